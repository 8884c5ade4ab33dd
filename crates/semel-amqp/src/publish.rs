//! Publishes batches from the outbox and waits for the confirmations.
//!
//! Each batch has its own channel while it is in flight. lapin attaches a returned message to whichever confirmation
//! arrives next, not to that message's own. So only when the whole channel is confirmed it is certain which messages
//! were returned, and the results are assigned at the end, by message id.

use std::{
    collections::HashMap,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use futures_util::{StreamExt as _, future::poll_immediate, stream::FuturesUnordered};
use lapin::{
    Channel, Confirmation, ErrorKind,
    message::BasicReturnMessage,
    options::BasicPublishOptions,
    protocol::{AMQPErrorKind, AMQPHardError},
    types::ShortString,
};
use semel::{
    Uptime,
    messaging::{Envelope, Published},
};
use tokio::{
    sync::OwnedSemaphorePermit,
    time::{Instant, sleep_until, timeout},
};

use crate::{
    Shared,
    link::{Open, State},
    message,
};

/// How long after `until` lapin may still write what it was given.
const GRACE: Duration = Duration::from_secs(1);

/// A body counts as one more message of the window per this many bytes.
const PER_PERMIT: usize = 16 << 10;

/// Publishes a batch and returns the results in its order.
pub(crate) async fn publish(shared: &Arc<Shared>, batch: &[Envelope], until: Uptime) -> Vec<Published> {
    let mut answers: Vec<Option<Published>> = vec![None; batch.len()];
    let mut todo: Vec<usize> = (0..batch.len()).collect();
    // If the server closes the channel because of one message, all later ones fail with it. They are sent again without
    // it; the offending one is sent alone, and gets the error.
    let mut alone = Vec::new();
    loop {
        let (which, is_alone) = match (todo.is_empty(), alone.pop()) {
            (false, kept) => {
                alone.extend(kept);
                (std::mem::take(&mut todo), false)
            }
            (true, Some(one)) => (vec![one], true),
            (true, None) => break,
        };
        let wait = if is_alone { until.remaining() } else { Duration::ZERO };
        let open = match usable(shared, until, wait).await {
            Ok(open) => open,
            Err(why) => {
                for i in which.into_iter().chain(alone) {
                    settle(&mut answers[i], Published::NotSent(why.clone()));
                }
                break;
            }
        };
        let pass = Pass { shared, open: &open, batch, until, unwritten: AtomicUsize::new(0) };
        let verdicts = pass.run(which).await;
        let is_blamed = |(_, verdict): &(usize, Verdict)| matches!(verdict, Verdict::Blamed(_));
        // Only then some messages are left for the next pass.
        let go_again = open.is_up() && verdicts.iter().any(is_blamed);
        for (i, verdict) in verdicts {
            match verdict {
                Verdict::Answer(answer) => settle(&mut answers[i], answer),
                Verdict::Blamed(why) if is_alone => answers[i] = Some(Published::Refused(why)),
                Verdict::Blamed(why) => {
                    answers[i] = Some(Published::Unknown(why));
                    alone.push(i);
                }
                Verdict::Again(why) => {
                    settle(&mut answers[i], Published::NotSent(why));
                    if go_again {
                        todo.push(i);
                    }
                }
            }
        }
        // In the order of arrival.
        alone.sort_unstable_by(|a, b| b.cmp(a));
    }
    answers.into_iter().map(|answer| answer.unwrap_or_else(|| Published::NotSent("it was not tried".into()))).collect()
}

/// Stores a result. A message that was sent once may be in its queue, even if it was not sent again.
fn settle(noted: &mut Option<Published>, answer: Published) {
    if !matches!((&*noted, &answer), (Some(Published::Unknown(_)), Published::NotSent(_))) {
        *noted = Some(answer);
    }
}

/// The connection, if publishing is allowed now.
async fn usable(shared: &Arc<Shared>, until: Uptime, wait: Duration) -> Result<Arc<Open>, String> {
    if until.has_passed() {
        return Err("the time was up".into());
    }
    let _ = timeout(until.remaining(), shared.publishing.attempted()).await;
    let open = match shared.publishing.state() {
        State::Up(open) if open.is_up() => open,
        _ if !wait.is_zero() => shared.publishing.up_within(shared, wait).await?,
        State::Up(_) => return Err("the connection was lost".into()),
        State::Down(why) => return Err(why),
        State::Closed => return Err("it is closed".into()),
    };
    match open.blocked() {
        Some(why) => Err(format!("the server asks for a pause: {why}")),
        None => Ok(open),
    }
}

/// The state of a message after a pass.
enum Verdict {
    Answer(Published),
    /// It was sent, and the server closed the channel because of this message or one near it.
    Blamed(String),
    /// It was not sent, because its channel had been closed.
    Again(String),
}

/// The answer for a message.
enum Word {
    Acked(Option<Name>),
    Nacked(Option<Name>),
    /// It was not written completely, so the server cannot have it.
    Unwritten(lapin::Error),
    /// It was written, and no confirmation will come.
    Lost(lapin::Error),
    Late,
}

/// The id of a returned message, and the reason.
type Name = (String, String, String);

type Sending<'a> = Pin<Box<dyn Future<Output = (usize, Word)> + Send + 'a>>;

/// Some messages, on one channel.
struct Pass<'a> {
    shared: &'a Arc<Shared>,
    open: &'a Open,
    batch: &'a [Envelope],
    until: Uptime,
    /// Messages that lapin has accepted and the socket has not.
    unwritten: AtomicUsize,
}

impl Pass<'_> {
    async fn run(&self, which: Vec<usize>) -> Vec<(usize, Verdict)> {
        let limit = self.until.remaining().min(self.shared.options.timeout);
        let channel = match timeout(limit, self.open.channel()).await {
            Ok(Ok(channel)) => channel,
            Ok(Err(error)) => return not_sent(which, &error.to_string()),
            Err(_) => return not_sent(which, "the server does not answer"),
        };
        let mut words: HashMap<usize, Word> = HashMap::with_capacity(which.len());
        let mut answers = Vec::with_capacity(which.len());
        let mut sending = FuturesUnordered::<Sending<'_>>::new();
        let deadline = Instant::now() + self.until.remaining() + GRACE;
        for (at, &i) in which.iter().enumerate() {
            let properties = match message::properties(&self.batch[i]) {
                Ok(properties) => properties,
                Err(why) => {
                    answers.push((i, Verdict::Answer(Published::Refused(why))));
                    continue;
                }
            };
            match self.may_send(i, &channel, &mut sending, &mut words).await {
                Ok(permit) => {
                    let mut one: Sending<'_> = Box::pin(self.send(i, &channel, properties, permit));
                    // The first poll passes it to lapin, at once, so that messages are sent in order.
                    match poll_immediate(&mut one).await {
                        Some((i, word)) => drop(words.insert(i, word)),
                        None => sending.push(one),
                    }
                }
                Err(Stop::ChannelClosed) => {
                    let why = "the server closed the channel before";
                    answers.extend(which[at..].iter().map(|&i| (i, Verdict::Again(why.into()))));
                    break;
                }
                Err(Stop::Paused(why)) => {
                    answers.extend(not_sent(which[at..].to_vec(), &why));
                    break;
                }
            }
        }
        self.collect(sending, deadline, &mut words).await;
        self.judge(words, channel, answers, &which)
    }

    /// Waits for room in the window, or fails if nothing may be sent any more. Collects confirmations meanwhile.
    async fn may_send(
        &self,
        i: usize,
        channel: &Channel,
        sending: &mut FuturesUnordered<Sending<'_>>,
        words: &mut HashMap<usize, Word>,
    ) -> Result<OwnedSemaphorePermit, Stop> {
        let options = &self.shared.options;
        let cost = 1 + u32::try_from(self.batch[i].message.body.len() / PER_PERMIT).unwrap_or(u32::MAX - 1);
        let cost = cost.min(options.window.max(1));
        let room = self.shared.window.clone().acquire_many_owned(cost);
        tokio::pin!(room);
        loop {
            let permit = tokio::select! {
                biased;
                permit = &mut room => Some(permit),
                Some((i, word)) = sending.next(), if !sending.is_empty() => {
                    words.insert(i, word);
                    None
                }
                () = tokio::time::sleep(self.until.remaining()) => None,
            };
            if self.until.has_passed() {
                return Err(Stop::Paused("the time was up".into()));
            }
            if let Some(why) = self.open.blocked() {
                return Err(Stop::Paused(format!("the server asks for a pause: {why}")));
            }
            if !self.open.is_up() {
                return Err(Stop::Paused("the connection was lost".into()));
            }
            if !channel.status().connected() {
                return Err(Stop::ChannelClosed);
            }
            match permit {
                Some(Ok(permit)) => return Ok(permit),
                Some(Err(_)) => return Err(Stop::Paused("it is closed".into())),
                None => {}
            }
        }
    }

    async fn send(
        &self,
        i: usize,
        channel: &Channel,
        properties: lapin::BasicProperties,
        _room: OwnedSemaphorePermit,
    ) -> (usize, Word) {
        let message = &self.batch[i].message;
        // Mandatory: otherwise a message without a queue is confirmed like any other.
        let options = BasicPublishOptions { mandatory: true, ..BasicPublishOptions::default() };
        let topic = ShortString::from(message.topic.as_str());
        self.unwritten.fetch_add(1, Ordering::Relaxed);
        let written = channel.basic_publish(ShortString::default(), topic, options, &message.body, properties).await;
        self.unwritten.fetch_sub(1, Ordering::Relaxed);
        let word = match written {
            Ok(confirm) => match timeout(self.shared.options.confirm_timeout, confirm).await {
                Ok(Ok(Confirmation::Ack(back))) => Word::Acked(back.map(name_of)),
                Ok(Ok(Confirmation::Nack(back))) => Word::Nacked(back.map(name_of)),
                // Impossible: the channel is in confirm mode.
                Ok(Ok(Confirmation::NotRequested)) | Err(_) => Word::Late,
                Ok(Err(error)) => Word::Lost(error),
            },
            Err(error) => Word::Unwritten(error),
        };
        (i, word)
    }

    /// Collects the remaining confirmations, each within its timeout. If lapin still holds messages when the time for
    /// sending is over, it would send them later, when another relay may have sent the next ones: so the connection is
    /// cut.
    async fn collect(
        &self,
        mut sending: FuturesUnordered<Sending<'_>>,
        deadline: Instant,
        words: &mut HashMap<usize, Word>,
    ) {
        let last = deadline + self.shared.options.confirm_timeout;
        let mut end = deadline;
        loop {
            tokio::select! {
                next = sending.next() => match next {
                    Some((i, word)) => drop(words.insert(i, word)),
                    None => return,
                },
                () = sleep_until(end) => {
                    if end != deadline {
                        return;
                    }
                    end = last;
                    if self.unwritten.load(Ordering::Relaxed) > 0 {
                        self.open.cut();
                        end = deadline + GRACE;
                    }
                }
            }
        }
    }

    fn judge(
        &self,
        words: HashMap<usize, Word>,
        channel: Channel,
        mut answers: Vec<(usize, Verdict)>,
        which: &[usize],
    ) -> Vec<(usize, Verdict)> {
        let told: Vec<usize> = answers.iter().map(|(i, _)| *i).collect();
        let sent: Vec<usize> = which.iter().copied().filter(|i| !told.contains(i)).collect();
        let back: HashMap<(&str, &str), &str> = words
            .values()
            .filter_map(|word| match word {
                Word::Acked(Some((id, topic, why))) | Word::Nacked(Some((id, topic, why))) => {
                    Some(((id.as_str(), topic.as_str()), why.as_str()))
                }
                _ => None,
            })
            .collect();
        let answered = |i: &usize| matches!(words.get(i), Some(Word::Acked(_) | Word::Nacked(_)));
        let all_answered = sent.iter().all(answered);
        for i in sent {
            let message = &self.batch[i].message;
            let id = message.id.to_string();
            let verdict = match (words.get(&i), back.get(&(id.as_str(), message.topic.as_str()))) {
                (Some(Word::Acked(_) | Word::Nacked(_)), Some(why)) => Published::Unroutable((*why).to_owned()),
                // It carried another message's return, so its own may come with a later confirmation.
                (Some(Word::Acked(Some(_))), None) if !all_answered => {
                    Published::Unknown("it is unknown whether the server returned it".into())
                }
                (Some(Word::Acked(_)), None) => Published::Confirmed,
                (Some(Word::Nacked(_)), None) => Published::Refused("the server refused it".into()),
                (Some(Word::Lost(error)), _) if is_blame(error) => {
                    answers.push((i, Verdict::Blamed(error.to_string())));
                    continue;
                }
                (Some(Word::Lost(error)), _) => Published::Unknown(error.to_string()),
                (Some(Word::Unwritten(error)), _) => {
                    answers.push((i, Verdict::Again(error.to_string())));
                    continue;
                }
                (Some(Word::Late) | None, _) => Published::Unknown("no confirmation in time".into()),
            };
            answers.push((i, Verdict::Answer(verdict)));
        }
        if all_answered && channel.status().connected() {
            self.open.keep(channel);
        }
        answers
    }
}

/// The reason why nothing more may be sent.
enum Stop {
    ChannelClosed,
    Paused(String),
}

fn not_sent(which: Vec<usize>, why: &str) -> Vec<(usize, Verdict)> {
    which.into_iter().map(|i| (i, Verdict::Answer(Published::NotSent(why.to_owned())))).collect()
}

fn name_of(back: BasicReturnMessage) -> Name {
    let id = back.delivery.properties.message_id().as_ref().map(|id| id.as_str().to_owned()).unwrap_or_default();
    (id, back.delivery.routing_key.as_str().to_owned(), back.reply_text.as_str().to_owned())
}

/// Whether the server closed a channel or connection because of a message, and not for another reason.
fn is_blame(error: &lapin::Error) -> bool {
    let ErrorKind::ProtocolError(error) = error.kind() else { return false };
    match error.kind() {
        AMQPErrorKind::Soft(_) => true,
        AMQPErrorKind::Hard(hard) => !matches!(
            hard,
            AMQPHardError::CONNECTIONFORCED
                | AMQPHardError::INTERNALERROR
                | AMQPHardError::RESOURCEERROR
                | AMQPHardError::INVALIDPATH
        ),
    }
}
