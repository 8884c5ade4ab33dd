//! Upgraded connections, such as WebSocket.

use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;

use crate::serve::Seat;

/// Copies bytes between the two upgraded connections until both are closed. The client's connection keeps its seat
/// until then.
pub(super) fn join(client: OnUpgrade, upstream: OnUpgrade, seat: Option<Seat>) {
    tokio::spawn(async move {
        let _seat = seat;
        let (client, upstream) = match tokio::try_join!(client, upstream) {
            Ok(sides) => sides,
            Err(error) => return tracing::debug!(%error, "a protocol upgrade failed"),
        };
        let (mut client, mut upstream) = (TokioIo::new(client), TokioIo::new(upstream));
        if let Err(error) = tokio::io::copy_bidirectional(&mut client, &mut upstream).await {
            tracing::debug!(%error, "an upgraded connection ended early");
        }
    });
}
