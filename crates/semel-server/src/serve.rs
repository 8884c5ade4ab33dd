//! The server's life: bind the port, serve until told to stop, let requests in flight finish.

pub(crate) mod framing;
mod limits;

use std::{convert::Infallible, io, sync::Arc, time::Duration};

use axum::{
    body::Body,
    extract::ConnectInfo,
    http::{Request, Response, header},
    serve::Listener,
};
use futures_util::future::{Either, ready};
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{
    net::TcpListener,
    sync::{OwnedSemaphorePermit, Semaphore, mpsc},
    time::Instant,
};
use tower::Service;

pub use limits::Limits;

use crate::{Error, Result, config::Listen, stop::Stop};

/// How long requests in flight may take after a stop was asked for. Some supervisors send SIGKILL after 10 s (Docker;
/// most others after 30 s), and the ledger needs a moment after the requests.
pub const DRAIN: Duration = Duration::from_secs(7);

/// The longest head of a request. Browsers and proxies stay below 16 KiB; hyper alone would keep 400 KiB of every
/// connection.
const LONGEST_HEAD: usize = 64 * 1024;

/// How much of a connection hyper keeps in its own buffers: a head of the longest kind must fit. By itself it would keep
/// 400 KiB, also for connections that are silent after a long body.
const LONGEST_BUFFER: usize = LONGEST_HEAD;

/// How often it is told that there are as many connections as there may be.
const TOLD_EVERY: Duration = Duration::from_secs(60);

/// How long connections without a request have to close when a stop is forced: they were told to, and need only be
/// scheduled.
const MOMENT: Duration = Duration::from_millis(100);

/// How serving ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Drained {
    /// Every request in flight was answered.
    Finished,
    /// The time was up, or the stop was forced, while requests were still in flight.
    CutOff,
}

/// Binds the address, and only if it is this machine's own.
///
/// # Errors
/// When the port is in use, the address cannot be bound, or a name such as `localhost` leads to another machine.
pub async fn bind(listen: &Listen) -> Result<TcpListener> {
    let failed = |source: io::Error| match source.kind() {
        io::ErrorKind::AddrInUse => Error::PortInUse { listen: listen.clone() },
        _ => Error::Bind { listen: listen.clone(), source },
    };
    let listener = TcpListener::bind((listen.host(), listen.port())).await.map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?.ip();
    // The configuration was checked by name; a hosts file may still send that name anywhere.
    if !address.is_loopback() {
        return Err(Error::NotLoopback { listen: listen.clone(), address });
    }
    Ok(listener)
}

/// The place of a connection among those that may be open. A request that wants to change the protocol has it in its
/// extensions: whoever goes on with the connection after that keeps it for as long.
#[derive(Clone, Debug)]
pub struct Seat(#[expect(dead_code, reason = "it is held, not looked at")] Arc<OwnedSemaphorePermit>);

/// Serves until `stop` is asked for, then waits for requests in flight, at most for the time that the limits give them.
/// Each request has the address of its peer as a [`ConnectInfo`] in its extensions.
///
/// A loop of our own and not `axum::serve`, which gives hyper no timer and takes any number of connections: clients
/// that send a head byte by byte, or nothing, could then keep theirs for ever, until there are no files left for the
/// database.
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
    // Every connection holds a sender: when the last is gone, so are they all.
    let (open, mut all_closed) = mpsc::channel::<Infallible>(1);

    loop {
        // Before it is accepted: whoever finds no seat waits in the system's own queue, and costs no file.
        let seat = tokio::select! {
            seat = seats.take() => seat,
            () = stop.asked() => break,
        };
        // Accepting waits out errors such as too many open files by itself.
        let (stream, peer) = tokio::select! {
            accepted = Listener::accept(&mut listener) => accepted,
            () = stop.asked() => break,
        };
        // Answers are small and written whole: waiting to fill a packet only adds delay. Failing at it costs nothing.
        let _ = stream.set_nodelay(true);
        let (app, own) = (app.clone(), seat.clone());
        let service = service_fn(move |mut request: Request<Incoming>| {
            request.extensions_mut().insert(ConnectInfo(peer));
            if request.headers().contains_key(header::UPGRADE) {
                request.extensions_mut().insert(own.clone());
            }
            match framing::refuse_strange_coding(request.headers()) {
                Some(refused) => Either::Left(ready(Ok(refused))),
                None => Either::Right(app.clone().call(request)),
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
        // First: where nothing is open, a stop that was forced at the same moment cuts nothing off.
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

/// The places for connections.
struct Seats {
    free: Arc<Semaphore>,
    all: usize,
    /// When it was last told that there was none.
    told: Option<Instant>,
}

impl Seats {
    fn new(all: usize) -> Self {
        Self { free: Arc::new(Semaphore::new(all)), all, told: None }
    }

    /// A free one, as soon as there is one.
    async fn take(&mut self) -> Seat {
        if self.free.available_permits() == 0 && self.told.is_none_or(|told| told.elapsed() > TOLD_EVERY) {
            self.told = Some(Instant::now());
            tracing::warn!(open = self.all, "as many connections are open as may be; others wait");
        }
        match self.free.clone().acquire_owned().await {
            Ok(seat) => Seat(Arc::new(seat)),
            // Nobody closes it.
            Err(_) => std::future::pending().await,
        }
    }
}
