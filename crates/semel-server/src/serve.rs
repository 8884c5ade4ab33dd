//! The server's life: bind the port, serve until the stop, let requests in flight finish.

pub(crate) mod framing;
mod limits;
mod linger;

use std::{convert::Infallible, io, sync::Arc, time::Duration};

use axum::{
    body::Body,
    extract::ConnectInfo,
    http::{Request, Response, header},
    serve::Listener,
};
use hyper::{
    body::{Body as _, Incoming},
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{
    net::TcpListener,
    sync::{OwnedSemaphorePermit, Semaphore, mpsc},
    time::Instant,
};
use tower::Service;

pub use limits::Limits;
use linger::{Lingering, Sending};

use crate::{Error, Result, config::Listen, stop::Stop};

/// How long requests in flight may take after a stop request. Some supervisors send SIGKILL after 10 s (Docker; most
/// others after 30 s), and the ledger needs a moment after the requests.
pub const DRAIN: Duration = Duration::from_secs(7);

/// The longest head of a request. Browsers and proxies stay below 16 KiB; hyper alone would keep 400 KiB of every
/// connection.
const LONGEST_HEAD: usize = 64 * 1024;

/// The size of hyper's buffer per connection: the longest head must fit. Hyper's default of 400 KiB is kept even by
/// connections that are idle after a long body.
const LONGEST_BUFFER: usize = LONGEST_HEAD;

/// How often the log reports that all connections are in use.
const TOLD_EVERY: Duration = Duration::from_secs(60);

/// How long idle connections have to close after a forced stop. They are closing and need only be scheduled.
const MOMENT: Duration = Duration::from_millis(100);

/// How serving ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Drained {
    /// Every request in flight was answered.
    Finished,
    /// Requests were still in flight when the time was up or the stop was forced.
    CutOff,
}

/// Binds the address if it belongs to this machine.
///
/// # Errors
/// When the port is in use, the address cannot be bound, or a name such as `localhost` resolves to another machine.
pub async fn bind(listen: &Listen) -> Result<TcpListener> {
    let failed = |source: io::Error| match source.kind() {
        io::ErrorKind::AddrInUse => Error::PortInUse { listen: listen.clone() },
        _ => Error::Bind { listen: listen.clone(), source },
    };
    let listener = TcpListener::bind((listen.host(), listen.port())).await.map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?.ip();
    // The configuration was checked by name, but a hosts file may resolve that name to any address.
    if !address.is_loopback() {
        return Err(Error::NotLoopback { listen: listen.clone(), address });
    }
    Ok(listener)
}

/// The seat of an open connection. A request that upgrades the protocol carries it in its extensions, and the task that
/// continues the connection holds it to the end.
#[derive(Clone, Debug)]
pub struct Seat(#[expect(dead_code, reason = "it is held, not looked at")] Arc<OwnedSemaphorePermit>);

/// Serves until `stop` is asked for, then waits for requests in flight, at most as long as the limits say. Each request
/// carries the address of its peer as a [`ConnectInfo`] in its extensions.
///
/// Not `axum::serve`: it gives hyper no timer and accepts any number of connections. Clients that send a head byte by
/// byte, or nothing, would keep theirs for ever, until no file descriptors are left for the database.
pub async fn run<App>(mut listener: TcpListener, app: App, stop: Stop, limits: Limits) -> Drained
where
    App: Service<Request<Incoming>, Response = Response<Body>, Error = Infallible, Future: Send>
        + Clone
        + Send
        + Sync
        + 'static,
{
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(limits.head).max_header_size(LONGEST_HEAD);
    http.max_buf_size(LONGEST_BUFFER);
    let mut seats = Seats::new(limits.connections);
    // Every connection holds a sender: the channel closes when the last connection ends.
    let (open, mut all_closed) = mpsc::channel::<Infallible>(1);

    loop {
        // Take the seat before accepting: a connection without a seat waits in the system's backlog and uses no file
        // descriptor.
        let seat = tokio::select! {
            seat = seats.take() => seat,
            () = stop.asked() => break,
        };
        // Accepting waits out errors such as too many open files by itself.
        let (stream, peer) = tokio::select! {
            accepted = Listener::accept(&mut listener) => accepted,
            () = stop.asked() => break,
        };
        // Answers are small and written whole, so waiting to fill a packet only adds delay. A failure is harmless.
        let _ = stream.set_nodelay(true);
        let (app, own, sending) = (app.clone(), seat.clone(), Sending::default());
        let stream = Lingering::new(stream, sending.clone());
        let service = service_fn(move |mut request: Request<Incoming>| {
            request.extensions_mut().insert(ConnectInfo(peer));
            if request.headers().contains_key(header::UPGRADE) {
                request.extensions_mut().insert(own.clone());
            }
            let (mut app, sending) = (app.clone(), sending.clone());
            async move {
                let has_body = !request.body().is_end_stream();
                let answer = match framing::refuse_strange_coding(request.headers()) {
                    Some(refused) => refused,
                    None => app.call(request).await?,
                };
                sending.note(has_body, &answer);
                Ok::<_, Infallible>(answer)
            }
        });
        let connection = http.serve_connection(TokioIo::new(stream), service).with_upgrades();
        let (stop, open) = (stop.clone(), open.clone());
        tokio::spawn(async move {
            let _held = (open, seat);
            tokio::pin!(connection);
            let ended = tokio::select! {
                ended = connection.as_mut() => ended,
                () = stop.asked() => {
                    connection.as_mut().graceful_shutdown();
                    connection.await
                }
            };
            if let Err(error) = ended {
                tracing::debug!(%peer, %error, "connection ended early");
            }
        });
    }

    drop((listener, open));
    let drain = limits.drain;
    tracing::info!("stopping; requests in flight have {drain:?}, a second signal ends at once");
    let finished = tokio::select! {
        // `biased`: if nothing is open, a stop that is forced at the same moment cuts nothing off.
        biased;
        _ = all_closed.recv() => true,
        () = tokio::time::sleep(drain) => false,
        () = stop.forced() => false,
    };
    match finished || tokio::time::timeout(MOMENT, all_closed.recv()).await.is_ok() {
        true => Drained::Finished,
        false => Drained::CutOff,
    }
}

/// The seats for connections.
struct Seats {
    free: Arc<Semaphore>,
    all: usize,
    /// When the log last reported that all seats are taken.
    told: Option<Instant>,
}

impl Seats {
    fn new(all: usize) -> Self {
        Self { free: Arc::new(Semaphore::new(all)), all, told: None }
    }

    /// Waits for a free seat.
    async fn take(&mut self) -> Seat {
        if self.free.available_permits() == 0 && self.told.is_none_or(|told| told.elapsed() > TOLD_EVERY) {
            self.told = Some(Instant::now());
            tracing::warn!(open = self.all, "all connections are in use; new ones wait");
        }
        match self.free.clone().acquire_owned().await {
            Ok(seat) => Seat(Arc::new(seat)),
            // The semaphore is never closed.
            Err(_) => std::future::pending().await,
        }
    }
}
