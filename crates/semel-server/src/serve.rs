//! The server's life: bind the port, serve until told to stop, let requests in flight finish.

use std::{convert::Infallible, io, time::Duration};

use axum::{
    body::Body,
    extract::ConnectInfo,
    http::{Request, Response},
    serve::Listener,
};
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{net::TcpListener, sync::mpsc};
use tower::Service;

use crate::{Error, Result, config::Listen, stop::Stop};

/// How long requests in flight may take after a stop was asked for. Some supervisors send SIGKILL after 10 s (Docker;
/// most others after 30 s), and the ledger needs a moment after the requests.
pub const DRAIN: Duration = Duration::from_secs(7);

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

/// Serves until `stop` is asked for, then waits for requests in flight, at most for `drain`. Each request has the
/// address of its peer as a [`ConnectInfo`] in its extensions.
///
/// A loop of our own and not `axum::serve`, which gives hyper no timer: hyper's limit of 30 s for sending a header
/// would then not hold, and a handful of silent clients could keep their connections for ever.
pub async fn run<App>(mut listener: TcpListener, app: App, stop: Stop, drain: Duration) -> Drained
where
    App: Service<Request<Incoming>, Response = Response<Body>, Error = Infallible, Future: Send>
        + Clone
        + Send
        + Sync
        + 'static,
{
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new());
    // Every connection holds a sender: when the last is gone, so are they all.
    let (open, mut all_closed) = mpsc::channel::<Infallible>(1);

    loop {
        // Accepting waits out errors such as too many open files by itself.
        let (stream, peer) = tokio::select! {
            accepted = Listener::accept(&mut listener) => accepted,
            () = stop.asked() => break,
        };
        // Answers are small and written whole: waiting to fill a packet only adds delay. Failing at it costs nothing.
        let _ = stream.set_nodelay(true);
        let app = app.clone();
        let service = service_fn(move |mut request: Request<Incoming>| {
            request.extensions_mut().insert(ConnectInfo(peer));
            app.clone().call(request)
        });
        let connection = http.serve_connection(TokioIo::new(stream), service).with_upgrades();
        let (stop, open) = (stop.clone(), open.clone());
        tokio::spawn(async move {
            let _open = open;
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
    tracing::info!("stopping; requests in flight have {drain:?}, a second signal ends at once");
    tokio::select! {
        _ = all_closed.recv() => Drained::Finished,
        () = tokio::time::sleep(drain) => Drained::CutOff,
        () = stop.forced() => Drained::CutOff,
    }
}
