//! Trials: a mail to one address.

use semel::prelude::*;
use semel_store::Audit;
use serde_json::{Value, json};

use super::{
    Service,
    list::address::Email,
    mail::verdict::Sent,
    problems::{NO_ENTRIES, TEST_NOT_RENDERED, TEST_NOT_SENT},
    send::Composer,
    tables::{entries, mailings::Mailing},
};
use crate::http::{
    answers::{damaged, patiently},
    problem::{Problem, of_store},
};

impl Service {
    /// Sends the mail of the first entry to another address, at once and without a trace in the mailing.
    pub(super) async fn send_test(&self, mailing: &Mailing, actor: &str, to: Email) -> Result<Value, Problem> {
        let number = mailing.number;
        let first = self.database.read(async |conn| entries::first(conn, number).await);
        let now = patiently(self.database.now()).await?.as_micros();
        let Some(mut entry) = patiently(first).await? else {
            let importing = mailing.phase == "importing";
            return Err(Problem::new(&NO_ENTRIES).with("retryable", importing));
        };
        let not_made = |why: String| Problem::new(&TEST_NOT_RENDERED).detail(why);
        entry.email = to.normal;
        // The link of another entry must not be used by its tester: this token fits none.
        entry.token.fill(0);
        let help = "restore its row of the table mailings from a backup";
        let composer = Composer::of(self, mailing).await.map_err(|error| damaged(error, &mailing.id, help))?;
        let composer = composer.map_err(not_made)?;
        let mut mail = composer.compose(&entry, now).map_err(not_made)?;
        let id = uuid::Uuid::now_v7().hyphenated().to_string();
        mail.message_id = format!("test.{id}@{}", self.config.message_domain);
        (mail.id, mail.key) = (format!("test-{id}"), format!("semel-test-{id}"));
        self.audit_test(mailing, actor, &mail.message_id).await.map_err(of_store)?;
        match self.transport.send(&mail).await {
            Sent::Accepted { external_id } => Ok(json!({
                "sent": true, "to": mail.to.to_string(), "messageId": mail.message_id, "externalId": external_id,
            })),
            other => {
                let later = matches!(
                    other,
                    Sent::NotNow { .. } | Sent::TooMany { .. } | Sent::Failing { .. } | Sent::Away { .. }
                );
                Err(Problem::new(&TEST_NOT_SENT).detail(said(other)).with("retryable", later))
            }
        }
    }

    /// Records a test mail before it is sent. The audit has no address: it is kept longer than the mailing.
    async fn audit_test(&self, mailing: &Mailing, actor: &str, message_id: &str) -> semel::Result<()> {
        let (store, [tenant, id, actor]) =
            (self.database.clone(), [mailing.tenant.as_str(), &mailing.id, actor].map(str::to_owned));
        let after = json!({ "messageId": message_id });
        let audited = self.ledger.transact(move |tx| async move {
            let audit = Audit { tenant: &tenant, actor: &actor, action: "mailings.test", subject: &id, reason: "" };
            store.audit_in(&tx, audit, None, Some(after)).await
        });
        audited.await
    }
}

/// Why a mail was not accepted, as a sentence.
fn said(sent: Sent) -> String {
    let (what, why) = match sent {
        Sent::Accepted { .. } => ("The mail was accepted", None),
        Sent::Refused { why } | Sent::RefusedOrUs { why } => ("The transport refused this mail", Some(why)),
        Sent::NotNow { why, .. } => ("The transport does not accept this mail now", Some(why)),
        Sent::TooMany { why, .. } => ("The transport accepts no mail for a while", Some(why)),
        Sent::Failing { why, .. } => ("The transport fails", Some(why)),
        Sent::Strange { why } => {
            ("The answer is not that of a mail service, and the mail may have been sent", Some(why))
        }
        Sent::ServerRefuses { why } => ("The transport refuses every mail of this server", Some(why)),
        Sent::Away { why } => ("The transport cannot be reached", Some(why)),
        Sent::Unknown { why } => ("The mail may or may not have been sent", Some(why)),
        Sent::InFlight { why, .. } => ("The transport is processing an earlier request with the same key", Some(why)),
        Sent::KeyConflict { why } => ("The transport knows the key with another content", Some(why)),
    };
    let why = why.map(|why| format!(": {}", why.trim_end_matches('.'))).unwrap_or_default();
    format!("{what}{why}.")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_test_mail_that_is_not_accepted_is_explained_by_a_sentence() {
        let why = || "550 no such user.".to_owned();
        assert_eq!(said(Sent::Refused { why: why() }), "The transport refused this mail: 550 no such user.");
        assert_eq!(
            said(Sent::Away { why: "connection refused".into() }),
            "The transport cannot be reached: connection refused."
        );
        let busy = Sent::InFlight { why: "HTTP 409: busy".into(), after: None };
        assert!(said(busy).ends_with("with the same key: HTTP 409: busy."));
    }
}
