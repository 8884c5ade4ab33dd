//! A connection that is reopened after a loss.

use std::{
    net::{Shutdown, TcpStream},
    os::fd::AsFd as _,
    sync::{Arc, OnceLock, Weak},
    time::Duration,
};

use futures_util::{Stream, StreamExt as _};
use lapin::{
    AsyncTcpStream, Channel, Connection, ConnectionProperties, Event,
    options::ConfirmSelectOptions,
    tcp::{AMQPUriTcpExt as _, OwnedTLSConfig},
};
use parking_lot::Mutex;
use tokio::{
    sync::watch,
    task::JoinHandle,
    time::{MissedTickBehavior, interval, timeout},
};
use tracing::{info, warn};

use crate::{Shared, topology};

/// The state of a link.
#[derive(Clone)]
pub(crate) enum State {
    /// There is no connection, with the reason.
    Down(String),
    /// There is one, and the queues are declared.
    Up(Arc<Open>),
    /// Closed for good.
    Closed,
}

/// A connection and its task.
pub(crate) struct Link {
    what: &'static str,
    state: watch::Sender<State>,
    keeper: Mutex<Option<JoinHandle<()>>>,
}

impl Link {
    /// A link without a task.
    pub(crate) fn new(what: &'static str) -> Self {
        let state = watch::Sender::new(State::Down(NOT_YET.into()));
        Self { what, state, keeper: Mutex::default() }
    }

    /// Starts the task, unless it runs. A task that panicked is started again at the next request; otherwise there
    /// would never be a connection again.
    pub(crate) fn keep(&self, shared: &Arc<Shared>) {
        let mut keeper = self.keeper.lock();
        if keeper.as_ref().is_none_or(JoinHandle::is_finished) && !matches!(*self.state.borrow(), State::Closed) {
            // Weak: the task must not keep its owner alive, whose drop ends it.
            *keeper = Some(tokio::spawn(keep(Arc::downgrade(shared), self.what, self.state.clone())));
        }
    }

    pub(crate) fn state(&self) -> State {
        self.state.borrow().clone()
    }

    /// Waits until one attempt was made.
    pub(crate) async fn attempted(&self) {
        let tried = |state: &State| !matches!(state, State::Down(why) if why == NOT_YET);
        let _ = self.state.subscribe().wait_for(tried).await;
    }

    /// The connection, within the timeout of a request; else the reason.
    pub(crate) async fn up(&self, shared: &Arc<Shared>) -> Result<Arc<Open>, String> {
        self.up_within(shared, shared.options.timeout).await
    }

    /// The same, within another timeout.
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

    /// Closes it gracefully, if the server answers in time.
    pub(crate) async fn close(&self, time: Duration) {
        let keeper = self.keeper.lock().take();
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
        if let Some(keeper) = self.keeper.get_mut().take() {
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
    /// Idle channels in confirm mode.
    channels: Mutex<Vec<Channel>>,
}

impl Open {
    /// The reason why the server asks publishers to pause, if it does.
    pub(crate) fn blocked(&self) -> Option<String> {
        self.blocked.borrow().clone()
    }

    pub(crate) fn is_up(&self) -> bool {
        self.connection.status().connected()
    }

    /// A channel in confirm mode for one batch: its confirmations belong to that batch only.
    pub(crate) async fn channel(&self) -> lapin::Result<Channel> {
        loop {
            let kept = self.channels.lock().pop();
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

    /// Keeps a channel for the next batch. Only one without open confirmations: a late one must not be taken for that
    /// of a later message.
    pub(crate) fn keep(&self, channel: Channel) {
        self.channels.lock().push(channel);
    }

    /// Cuts the connection. Buffered bytes are never sent, as a graceful close would.
    pub(crate) fn cut(&self) {
        if let Some(socket) = self.socket.get() {
            let _ = socket.shutdown(Shutdown::Both);
        }
    }
}

/// Opens the connection, watches it, and reconnects after a loss.
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
        // Logged once per change: an hour of failed attempts would fill the log.
        if failures == 0 {
            warn!(connection = what, why, "no connection to RabbitMQ; trying again");
        }
        state.send_replace(State::Down(why));
        failures += 1;
        tokio::time::sleep(pause(&backoff, failures)).await;
    }
}

/// The wait after the `nth` failure, less up to a fifth at random: nodes that lost their connections together should
/// not reconnect together.
pub(crate) fn pause(backoff: &semel::Backoff, nth: u32) -> Duration {
    backoff.after(nth, fastrand::i64(0..1_000_000))
}

type Opened = (Arc<Open>, std::pin::Pin<Box<dyn Stream<Item = Event> + Send>>);

/// Connects and declares the queues.
async fn open(shared: &Shared) -> Result<Opened, String> {
    let (time, socket) = (shared.options.timeout, Arc::<OnceLock<TcpStream>>::default());
    let runtime = lapin::runtime::default_runtime().map_err(|error| error.to_string())?;
    let tls = OwnedTLSConfig { cert_chain: shared.options.ca.clone(), ..OwnedTLSConfig::default() };
    let kept = socket.clone();
    // lapin's own recovery is off: it would restore its channels, and with them messages that were already reported as
    // unknown.
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
        // A queue that cannot be declared affects only itself: its messages are unroutable.
        warn!(%error, "not all queues could be declared");
    }
    Ok((Arc::new(open), events))
}

/// Returns when the connection is lost, with the reason.
async fn watch_over(open: &Open, mut events: impl Stream<Item = Event> + Unpin) -> String {
    // A safety net beside the events.
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
            // Errors of a channel arrive here, too.
            Some(Event::Error(error)) if !open.is_up() => return error.to_string(),
            None => return "the connection was lost".into(),
            _ => {}
        }
    }
}

/// lapin runs each connection in a separate thread, which logs returned messages with their payloads. Payloads do not
/// belong in a log, so that thread logs nothing; this crate logs what matters.
fn silence_this_thread() {
    let silence = tracing::subscriber::set_default(tracing::subscriber::NoSubscriber::new());
    // Restored when the guard is dropped, which must not happen before the thread ends.
    std::mem::forget(silence);
}

#[cfg(test)]
mod tests {
    use semel::messaging::Broker as _;

    use super::*;
    use crate::{Amqp, Options};

    #[tokio::test]
    async fn a_task_that_panicked_is_started_again() {
        let amqp = Amqp::connect("amqp://127.0.0.1:1", Options::default()).unwrap();
        let link = &amqp.shared.publishing;
        link.attempted().await;
        let keeper = link.keeper.lock().as_ref().unwrap().abort_handle();
        keeper.abort();
        while !keeper.is_finished() {
            tokio::task::yield_now().await;
        }
        link.state.send_replace(State::Down(NOT_YET.into()));
        assert!(link.up_within(&amqp.shared, Duration::ZERO).await.is_err());
        timeout(Duration::from_secs(10), link.attempted()).await.expect("it tries again");
        amqp.close().await;
        link.keep(&amqp.shared);
        assert!(link.keeper.lock().is_none(), "a closed link stays closed");
    }
}
