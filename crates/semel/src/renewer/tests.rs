use tokio::sync::{mpsc, oneshot};

use super::*;
use crate::Timestamp;

#[test]
fn a_holder_stops_before_the_databases_deadline_and_at_the_longest_run() {
    let policy = Policy { lease: Duration::from_secs(30), max_run: Duration::from_secs(40), ..Policy::default() };
    let claimed = Uptime::now();
    let own = OwnDeadline::of_claim(claimed, &policy);
    assert!(own.at() == claimed + Duration::from_secs(27));
    let renewed = own.renewed(claimed + Duration::from_secs(5));
    assert!(renewed.at() == claimed + Duration::from_secs(32));
    // The database cuts this renewal short at 40 s, and the holder must notice.
    let cut = renewed.renewed(claimed + Duration::from_secs(20));
    assert!(cut.at() == claimed + Duration::from_secs(37));
}

/// A request that the test answers.
struct Request {
    asked: Vec<LeaseId>,
    answer: oneshot::Sender<Result<Vec<Answer>>>,
}

/// A renewer whose store is the test. Journal writes never end.
fn serve(renewer: &Arc<Renewer>) -> mpsc::UnboundedReceiver<Request> {
    let (sender, requests) = mpsc::unbounded_channel();
    let renew = move |asked| {
        let (answer, answered) = oneshot::channel();
        sender.send(Request { asked, answer }).unwrap();
        async move { answered.await.unwrap_or(Ok(Vec::new())) }
    };
    let renewer = renewer.clone();
    tokio::spawn(async move { renewer.serve(renew, std::future::pending).await });
    requests
}

fn keep(renewer: &Arc<Renewer>, id: i64, term: Duration, due: Uptime) -> Renewal {
    let policy = Policy { lease: term, max_run: 100 * term, ..Policy::default() };
    renewer.keep_from(due, (id, Fence(id)), term, OwnDeadline::of_claim(Uptime::now(), &policy))
}

fn renewed(leases: &[LeaseId]) -> Result<Vec<Answer>> {
    Ok(leases.iter().map(|_| Answer::Renewed { deadline: Timestamp::from_micros(0), cancelled: false }).collect())
}

const SHORT: (i64, Fence) = (1, Fence(1));
const LONG: (i64, Fence) = (2, Fence(2));

/// The store answers more slowly than a short lease can wait: the short one is requested again, alone, and the long one
/// gets the answer to the first request. Before, both were given up at the deadline of the short one.
#[tokio::test]
async fn a_late_answer_still_counts_for_the_leases_that_can_wait() {
    let renewer = Arc::<Renewer>::default();
    let mut requests = serve(&renewer);
    let now = Uptime::now();
    let short = keep(&renewer, SHORT.0, Duration::from_secs(3), now);
    let long = keep(&renewer, LONG.0, Duration::from_secs(3000), now);
    let mut first = requests.recv().await.unwrap();
    while first.asked.len() < 2 {
        // The renewer was faster than the test: they are requested together from the next round on.
        first.answer.send(Ok(vec![Answer::Busy; first.asked.len()])).unwrap();
        first = requests.recv().await.unwrap();
    }
    let again = requests.recv().await.unwrap();
    assert_eq!(again.asked, [SHORT], "the long one can wait");
    let before = (short.watch().borrow().until.unwrap(), long.watch().borrow().until.unwrap());
    again.answer.send(renewed(&[SHORT])).unwrap();
    first.answer.send(renewed(&[SHORT, LONG])).unwrap();
    for (until, before) in [(short.watch(), before.0), (long.watch(), before.1)] {
        let mut until = until;
        until.wait_for(|standing| standing.until.is_some_and(|until| until > before)).await.unwrap();
    }
}

/// Journal writes never end here, and renewals go on.
#[tokio::test]
async fn renewals_do_not_wait_for_the_journal() {
    let renewer = Arc::<Renewer>::default();
    let mut requests = serve(&renewer);
    let lease = keep(&renewer, 1, Duration::from_secs(3), Uptime::now());
    for _ in 0..3 {
        let before = lease.watch().borrow().until.unwrap();
        let request = tokio::time::timeout(Duration::from_secs(60), requests.recv()).await;
        let Request { asked, answer } = request.expect("the next renewal waits for the journal").unwrap();
        answer.send(renewed(&asked)).unwrap();
        lease.watch().wait_for(|standing| standing.until.is_none_or(|until| until > before)).await.unwrap();
        assert!(lease.watch().borrow().until.is_some());
    }
}

/// If a request is never answered, each lease is signalled lost at its own deadline.
#[tokio::test]
async fn a_store_that_answers_nothing_loses_each_lease_at_its_own_deadline() {
    let renewer = Arc::<Renewer>::default();
    let mut requests = serve(&renewer);
    let now = Uptime::now();
    let short = keep(&renewer, SHORT.0, Duration::from_millis(200), now);
    let long = keep(&renewer, LONG.0, Duration::from_secs(3000), now);
    let unanswered = tokio::spawn(async move {
        let mut all = Vec::new();
        while let Some(request) = requests.recv().await {
            all.push(request);
        }
    });
    short.lost().await;
    assert!(long.watch().borrow().until.is_some());
    unanswered.abort();
}
