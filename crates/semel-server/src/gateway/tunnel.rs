//! Connections that became another protocol, such as WebSocket.

use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;

use crate::serve::Seat;

/// Lets the two sides talk, once both have changed, until both have closed. The client's connection counts among those
/// that are open for as long.
pub(super) fn join(client: OnUpgrade, upstream: OnUpgrade, seat: Option<Seat>) {
    tokio::spawn(async move {
        let _seat = seat;
        let (client, upstream) = match tokio::try_join!(client, upstream) {
            Ok(sides) => sides,
            Err(error) => return tracing::debug!(%error, "a change of protocol was not carried out"),
        };
        let (mut client, mut upstream) = (TokioIo::new(client), TokioIo::new(upstream));
        if let Err(error) = tokio::io::copy_bidirectional(&mut client, &mut upstream).await {
            tracing::debug!(%error, "a connection of another protocol ended early");
        }
    });
}
