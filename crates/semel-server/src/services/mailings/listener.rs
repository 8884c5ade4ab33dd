//! The queue `mailing.process`: a message makes the present run of its mailing due. Only the worker claims the run, so a
//! second message, or a second listener, finds it there.

use semel::{
    Ledger, Scope,
    messaging::{BoxFuture, Handler, Received, Refusal},
};
use semel_store::{Database, Tx};
use serde::Deserialize;

use super::{run::work, tables::mailings};

/// The handler of the queue.
pub(super) struct Listener {
    pub(super) ledger: Ledger<Database>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Body {
    mailing_id: String,
}

impl Handler<Database> for Listener {
    fn handle<'a>(&'a self, message: &'a Received, tx: &'a Tx) -> BoxFuture<'a, Result<(), Refusal>> {
        Box::pin(async move {
            let body: Body = serde_json::from_slice(&message.body)
                .map_err(|error| Refusal::Dead(format!("the message is not {{\"mailingId\": …}}: {error}")))?;
            let tenant = message.tenant.as_deref().unwrap_or(Scope::DEFAULT_TENANT);
            let retry = |error: semel::Error| Refusal::Retry(error.to_string());
            let found = {
                let mut held = tx.connection().await.map_err(retry)?;
                mailings::find(&mut held.get().map_err(retry)?, tenant, &body.mailing_id).await.map_err(retry)?
            };
            // A deleted mailing has nothing to do; another system may know ids that we do not.
            let Some(mailing) = found.filter(|mailing| mailing.active) else {
                tracing::info!(mailing = body.mailing_id, "a message names a mailing that has nothing to do");
                return Ok(());
            };
            self.ledger.enqueue_in(tx, vec![work(&mailing).map_err(retry)?]).await.map(drop).map_err(retry)
        })
    }
}
