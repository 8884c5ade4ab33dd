//! A connection that is opened again when it is lost.

use std::{
    net::{Shutdown, TcpStream},
    os::fd::AsFd as _,
    sync::{Arc, Mutex, OnceLock, Weak},
    time::Duration,
};

use futures_util::{Stream, StreamExt as _};
use lapin::{
    AsyncTcpStream, Channel, Connection, ConnectionProperties, Event,
    options::ConfirmSelectOptions,
    tcp::{AMQPUriTcpExt as _, OwnedTLSConfig},
};
use tokio::{
    sync::watch,
    task::JoinHandle,
    time::{MissedTickBehavior, interval, timeout},
};
use tracing::{info, warn};

use crate::{Shared, topology};

/// Where a link stands.
#[derive(Clone)]
pub(crate) enum State {
    /// There is no connection, and why.
    Down(String),
    /// There is one, and the queues are made.
    Up(Arc<Open>),
    /// There will be none any more.
    Closed,
}

/// A connection and whoever keeps it.
pub(crate) struct Link {
    what: &'static str,
    state: watch::Sender<State>,
    keeper: Mutex<Option<JoinHandle<()>>>,
}

impl Link {
    /// One that nobody keeps yet.
    pub(crate) fn new(what: &'static str) -> Self {
        let state = watch::Sender::new(State::Down(NOT_YET.into()));
        Self { what, state, keeper: Mutex::default() }
    }

    /// Begins to keep it, unless somebody does. A keeper that panicked has a successor at the next question: else there
    /// would never be a connection again.
    pub(crate) fn keep(&self, shared: &Arc<Shared>) {
        let mut keeper = self.keeper.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if keeper.as_ref().is_none_or(JoinHandle::is_finished) && !matches!(*self.state.borrow(), State::Closed) {
            // Weak: the keeper must not keep alive what ends it when dropped.
            *keeper = Some(tokio::spawn(keep(Arc::downgrade(shared), self.what, self.state.clone())));
        }
    }

    pub(crate) fn state(&self) -> State {
        self.state.borrow().clone()
    }

    /// Waits until one attempt has been made.
    pub(crate) async fn attempted(&self) {
        let tried = |state: &State| !matches!(state, State::Down(why) if why == NOT_YET);
        let _ = self.state.subscribe().wait_for(tried).await;
    }

    /// The connection, if it comes within the time that a question may take; else why it does not.
    pub(crate) async fn up(&self, shared: &Arc<Shared>) -> Result<Arc<Open>, String> {
        self.up_within(shared, shared.options.timeout).await
    }

    /// The same, within another time.
    pub(crate) async fn up_within(&self, shared: &Arc<Shared>, time: Duration) -> Result<Arc<Open>, String> {
        self.keep(shared);
        let mut state = self.state.subscribe();
        let _ = timeout(time, state.wait_for(|state| !matches!(state, State::Down(_)))).await;
        match self.state() {
            State::Up(open) => Ok(open),
            State::Down(why) => Err(why),
            State::Closed => Err("it is closed".into()),
        }
    }

    /// Closes it in order, if the server answers in time.
    pub(crate) async fn close(&self, time: Duration) {
        let keeper = self.keeper.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).take();
        if let Some(keeper) = keeper {
            keeper.abort();
        }
        if let State::Up(open) = self.state.send_replace(State::Closed)
            && timeout(time, open.connection.close(200, "OK".into())).await.is_err()
        {
            open.cut();
        }
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        let keeper = self.keeper.get_mut().unwrap_or_else(|poisoned| poisoned.into_inner());
        if let Some(keeper) = keeper.take() {
            keeper.abort();
        }
    }
}

const NOT_YET: &str = "not connected yet";

/// An open connection.
pub(crate) struct Open {
    pub(crate) connection: Connection,
    socket: Arc<OnceLock<TcpStream>>,
    blocked: watch::Sender<Option<String>>,
    /// Channels in confirm mode on which nothing is on its way.
    channels: Mutex<Vec<Channel>>,
}

impl Open {
    /// Why the server asks publishers to pause, if it does.
    pub(crate) fn blocked(&self) -> Option<String> {
        self.blocked.borrow().clone()
    }

    pub(crate) fn is_up(&self) -> bool {
        self.connection.status().connected()
    }

    /// A channel in confirm mode for one batch: the words on it are about that batch only.
    pub(crate) async fn channel(&self) -> lapin::Result<Channel> {
        loop {
            let kept = self.channels.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).pop();
            match kept {
                Some(channel) if channel.status().connected() => return Ok(channel),
                Some(_) => {}
                None => break,
            }
        }
        let channel = self.connection.create_channel().await?;
        channel.confirm_select(ConfirmSelectOptions::default()).await?;
        Ok(channel)
    }

    /// Keeps a channel for the next batch. Only one on which every message has been answered: a late word must not be
    /// taken for one on a later message.
    pub(crate) fn keep(&self, channel: Channel) {
        self.channels.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).push(channel);
    }

    /// Ends the connection at once. What is still in our buffers is never sent: closing in order would send it first.
    pub(crate) fn cut(&self) {
        if let Some(socket) = self.socket.get() {
            let _ = socket.shutdown(Shutdown::Both);
        }
    }
}

/// Opens the connection, watches it, and begins again when it is lost.
async fn keep(shared: Weak<Shared>, what: &'static str, state: watch::Sender<State>) {
    let mut failures = 0;
    loop {
        let Some(strong) = shared.upgrade() else { return };
        let backoff = strong.options.backoff;
        let opened = open(&strong).await;
        drop(strong);
        let why = match opened {
            Ok((open, events)) => {
                info!(connection = what, "connected to RabbitMQ");
                failures = 0;
                state.send_replace(State::Up(open.clone()));
                watch_over(&open, events).await
            }
            Err(why) => why,
        };
        // Once per change is enough: an hour of failed attempts would fill the log.
        if failures == 0 {
            warn!(connection = what, why, "no connection to RabbitMQ; trying again");
        }
        state.send_replace(State::Down(why));
        failures += 1;
        tokio::time::sleep(pause(&backoff, failures)).await;
    }
}

/// How long to wait after the `nth` failure, up to a fifth shorter by chance: nodes that lost their connections
/// together should not come back together.
pub(crate) fn pause(backoff: &semel::Backoff, nth: u32) -> Duration {
    backoff.after(nth, fastrand::i64(0..1_000_000))
}

type Opened = (Arc<Open>, std::pin::Pin<Box<dyn Stream<Item = Event> + Send>>);

/// Connects and makes the queues.
async fn open(shared: &Shared) -> Result<Opened, String> {
    let (time, socket) = (shared.options.timeout, Arc::<OnceLock<TcpStream>>::default());
    let runtime = lapin::runtime::default_runtime().map_err(|error| error.to_string())?;
    let tls = OwnedTLSConfig { cert_chain: shared.options.ca.clone(), ..OwnedTLSConfig::default() };
    let kept = socket.clone();
    // We try again ourselves: lapin would bring its channels back by itself, and with them messages of which it was
    // said already that nobody knows what became of them.
    let properties = ConnectionProperties::default()
        .configure_backoff(|backoff| backoff.with_max_times(0))
        .with_connection_name(shared.options.name.as_str().into());
    let connecting = Connection::connector(
        shared.uri.clone(),
        runtime,
        async move |uri, runtime| {
            silence_this_thread();
            let stream = timeout(time, uri.connect_with_config_async(tls.as_ref(), &runtime)).await;
            let stream = stream.map_err(|_| std::io::Error::from(std::io::ErrorKind::TimedOut))??;
            let plain = match &stream {
                AsyncTcpStream::Plain(plain) => Some(plain),
                AsyncTcpStream::Rustls(tls) => Some(tls.get_ref().0),
                _ => None,
            };
            if let Some(plain) = plain {
                plain.get_ref().set_nodelay(true)?;
                let _ = kept.set(TcpStream::from(plain.get_ref().as_fd().try_clone_to_owned()?));
            }
            Ok(stream)
        },
        properties,
    );
    let connection = match timeout(2 * time, connecting).await {
        Ok(connected) => connected.map_err(|error| error.to_string())?,
        Err(_) => {
            if let Some(socket) = socket.get() {
                let _ = socket.shutdown(Shutdown::Both);
            }
            return Err("the server does not answer".into());
        }
    };
    let events = Box::pin(connection.events_listener());
    let open = Open { connection, socket, blocked: watch::Sender::new(None), channels: Mutex::default() };
    let names: Vec<String> = shared.queues.lock().await.iter().cloned().collect();
    if let Err(error) = topology::declare(&open.connection, &names, time).await {
        if !open.is_up() {
            return Err(error.to_string());
        }
        // A queue that cannot be made is that queue's trouble: its messages are told to be unroutable.
        warn!(%error, "not all queues could be made again");
    }
    Ok((Arc::new(open), events))
}

/// Returns when the connection is lost, with the reason.
async fn watch_over(open: &Open, mut events: impl Stream<Item = Event> + Unpin) -> String {
    // A safety net under the events.
    let mut tick = interval(Duration::from_secs(1));
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let event = tokio::select! {
            event = events.next() => event,
            _ = tick.tick() => {
                if open.is_up() {
                    continue;
                }
                return "the connection was lost".into();
            }
        };
        match event {
            Some(Event::ConnectionBlocked(why)) => {
                warn!(why, "RabbitMQ asks publishers to pause");
                open.blocked.send_replace(Some(why));
            }
            Some(Event::ConnectionUnblocked) => {
                info!("RabbitMQ takes messages again");
                open.blocked.send_replace(None);
            }
            // Errors of a channel come here, too.
            Some(Event::Error(error)) if !open.is_up() => return error.to_string(),
            None => return "the connection was lost".into(),
            _ => {}
        }
    }
}

/// lapin runs each connection in a thread of its own, and that thread logs messages that come back, with everything
/// that is in them. Payloads do not belong into a log, so this thread logs nothing; we log what matters ourselves.
fn silence_this_thread() {
    let silence = tracing::subscriber::set_default(tracing::subscriber::NoSubscriber::new());
    // Undone when the guard is dropped, which must not be before the thread ends.
    std::mem::forget(silence);
}

#[cfg(test)]
mod tests {
    use semel::messaging::Broker as _;

    use super::*;
    use crate::{Amqp, Options};

    #[tokio::test]
    async fn a_keeper_that_died_has_a_successor() {
        let amqp = Amqp::connect("amqp://127.0.0.1:1", Options::default()).unwrap();
        let link = &amqp.shared.publishing;
        link.attempted().await;
        let keeper = link.keeper.lock().unwrap().as_ref().unwrap().abort_handle();
        keeper.abort();
        while !keeper.is_finished() {
            tokio::task::yield_now().await;
        }
        link.state.send_replace(State::Down(NOT_YET.into()));
        assert!(link.up_within(&amqp.shared, Duration::ZERO).await.is_err());
        timeout(Duration::from_secs(10), link.attempted()).await.expect("nobody tries any more");
        amqp.close().await;
        link.keep(&amqp.shared);
        assert!(link.keeper.lock().unwrap().is_none(), "what is closed stays so");
    }
}
