//! Many questions in one: what callers ask while a question is out goes together in the next.
//!
//! A caller that finds nobody asking asks at once, alone; under load the questions gather by
//! themselves, and the more there are the fewer round trips each costs. Nothing is kept: every answer is
//! read after it was asked for. Questions run in a task of their own, so a caller that goes away takes
//! nobody's answer with it. A question that gets no answer in time fails for all whose it was, so that
//! a dead wire does not keep the next ones waiting.

use std::sync::{Arc, Mutex, PoisonError};

use futures::future::BoxFuture;
use tokio::sync::oneshot;

/// How many questions may be out at a time: while one waits for the database, the next one gathers.
const OUT: usize = 1;

type Ask<K, V> = dyn Fn(Vec<K>) -> BoxFuture<'static, sqlx::Result<Vec<V>>> + Send + Sync;

/// Gathers questions of one kind.
pub struct Gather<K, V>(Arc<Inner<K, V>>);

struct Inner<K, V> {
    ask: Box<Ask<K, V>>,
    largest: usize,
    state: Mutex<State<K, V>>,
}

struct State<K, V> {
    waiting: Vec<Waiting<K, V>>,
    out: usize,
}

struct Waiting<K, V> {
    key: K,
    answer: oneshot::Sender<sqlx::Result<V>>,
}

impl<K, V> Clone for Gather<K, V> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<K, V> std::fmt::Debug for Gather<K, V> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gather").finish_non_exhaustive()
    }
}

impl<K: Send + 'static, V: Send + 'static> Gather<K, V> {
    /// Gathers up to `largest` keys into one `ask`, which answers each, in their order.
    pub fn new(
        largest: usize,
        ask: impl Fn(Vec<K>) -> BoxFuture<'static, sqlx::Result<Vec<V>>> + Send + Sync + 'static,
    ) -> Self {
        Self(Arc::new(Inner {
            ask: Box::new(ask),
            largest,
            state: Mutex::new(State {
                waiting: Vec::new(),
                out: 0,
            }),
        }))
    }

    /// The answer for one key.
    pub async fn get(&self, key: K) -> sqlx::Result<V> {
        let (answer, waits) = oneshot::channel();
        let asks = {
            let mut state = self.0.state();
            state.waiting.push(Waiting { key, answer });
            let asks = state.out < OUT;
            state.out += usize::from(asks);
            asks
        };
        if asks {
            let asking = Asking {
                inner: self.0.clone(),
                is_out: true,
            };
            tokio::spawn(asking.run());
        }
        super::within(2 * super::PATIENCE, waits)
            .await?
            .map_err(|_| sqlx::Error::WorkerCrashed)?
    }
}

impl<K, V> Inner<K, V> {
    fn state(&self) -> std::sync::MutexGuard<'_, State<K, V>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whoever asks, until nobody waits; dropped half-way, others ask in its place.
struct Asking<K, V> {
    inner: Arc<Inner<K, V>>,
    is_out: bool,
}

impl<K, V> Drop for Asking<K, V> {
    fn drop(&mut self) {
        if self.is_out {
            self.inner.state().out -= 1;
        }
    }
}

impl<K: Send + 'static, V: Send + 'static> Asking<K, V> {
    async fn run(mut self) {
        loop {
            // Whoever can ask at this moment goes along.
            tokio::task::yield_now().await;
            let Some(batch) = self.next() else {
                return;
            };
            let (keys, answers): (Vec<_>, Vec<_>) = batch
                .into_iter()
                .map(|waiting| (waiting.key, waiting.answer))
                .unzip();
            match super::within(super::PATIENCE, (self.inner.ask)(keys))
                .await
                .flatten()
            {
                Ok(values) => {
                    // Whoever went away needs no answer.
                    for (answer, value) in answers.into_iter().zip(values) {
                        let _ = answer.send(Ok(value));
                    }
                }
                Err(error) => {
                    for answer in answers {
                        let _ = answer.send(Err(alike(&error)));
                    }
                }
            }
        }
    }

    /// Those who wait now, but for whoever gave up; when nobody does, this is over, and the next who comes asks.
    fn next(&mut self) -> Option<Vec<Waiting<K, V>>> {
        let mut state = self.inner.state();
        state.waiting.retain(|waiting| !waiting.answer.is_closed());
        if state.waiting.is_empty() {
            state.out -= 1;
            drop(state);
            self.is_out = false;
            return None;
        }
        let end = state.waiting.len().min(self.inner.largest);
        Some(state.waiting.drain(..end).collect())
    }
}

/// The same failure once more, for each who asked.
fn alike(error: &sqlx::Error) -> sqlx::Error {
    if super::is_unavailable(error) {
        sqlx::Error::PoolTimedOut
    } else {
        sqlx::Error::Decode(error.to_string().into())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    };

    use futures::{FutureExt as _, future::join_all};
    use tokio::sync::Semaphore;

    use super::Gather;

    #[tokio::test]
    async fn what_is_asked_while_a_question_is_out_goes_together_in_the_next() {
        let asked = Arc::new(AtomicUsize::new(0));
        let gate = Arc::new(Semaphore::new(0));
        let gather = {
            let (asked, gate) = (asked.clone(), gate.clone());
            Gather::new(100, move |keys: Vec<u32>| {
                let (asked, gate) = (asked.clone(), gate.clone());
                async move {
                    asked.fetch_add(1, Ordering::SeqCst);
                    gate.acquire().await.expect("an open gate").forget();
                    Ok(keys.into_iter().map(|key| key * 2).collect())
                }
                .boxed()
            })
        };
        let callers = (0..50).map(|key| {
            let gather = gather.clone();
            tokio::spawn(async move { gather.get(key).await.expect("an answer") })
        });
        let callers: Vec<_> = callers.collect();
        while asked.load(Ordering::SeqCst) < 1 {
            tokio::task::yield_now().await;
        }
        gate.add_permits(10);
        let answers: Vec<_> = join_all(callers)
            .await
            .into_iter()
            .map(Result::unwrap)
            .collect();
        assert_eq!(answers, (0..50).map(|key| key * 2).collect::<Vec<_>>());
        assert!(
            asked.load(Ordering::SeqCst) <= 4,
            "fifty callers, few questions"
        );
    }

    #[tokio::test]
    async fn a_failure_reaches_everybody_who_asked_and_the_next_question_is_asked_anew() {
        let asked = Arc::new(AtomicUsize::new(0));
        let gather = {
            let asked = asked.clone();
            Gather::new(100, move |keys: Vec<u32>| {
                let first = asked.fetch_add(1, Ordering::SeqCst) == 0;
                async move {
                    if first {
                        return Err(sqlx::Error::PoolTimedOut);
                    }
                    Ok(keys)
                }
                .boxed()
            })
        };
        assert!(matches!(
            gather.get(1).await,
            Err(sqlx::Error::PoolTimedOut)
        ));
        assert_eq!(gather.get(2).await.expect("an answer"), 2);
    }
}
