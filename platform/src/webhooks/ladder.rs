//! What follows an attempt: the one pure function that decides between done, again and dead.
//!
//! A delivery climbs fixed delays without jitter, so that a tenant can tell from the documentation
//! when the next attempt comes. `ladder[n - 1]` is the wait after attempt `n` has failed; a failure
//! beyond the last rung is the end. Only failures that time may heal climb: an answer that means
//! "never" (`410`, any other `4xx`, a target that is not allowed) goes to the dead letters at once.
//! A `429` that names a time overrides the rung, since coming earlier than asked is the one thing a
//! throttled receiver must not see; it still uses up an attempt, so no receiver can make a delivery
//! live for ever. A time that has passed already is none: by a clock that is slow, or by a `0`, a receiver
//! would have five attempts used up within a moment.

use std::time::{Duration, SystemTime};

/// The longest wait that a receiver can ask for with `Retry-After`.
pub const MAX_RETRY_AFTER: Duration = Duration::from_hours(24);

/// How one attempt ended, in the terms that decide what follows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The receiver answered 2xx.
    Delivered,
    /// The receiver answered 429, with the wait it asked for where it named a usable one.
    Throttled {
        /// Time from the answer to the earliest next attempt; no time at all is none.
        retry_after: Option<Duration>,
    },
    /// The receiver answered 410: it wants nothing any more.
    Gone,
    /// The receiver answered another 4xx: the same request would be refused again.
    Rejected {
        /// The status code of the answer.
        status: u16,
    },
    /// A failure that time may heal: 5xx, 1xx, 3xx, no connection, no answer in time, a broken answer.
    Failed,
    /// The tenant's plugin trapped, ran out of time, memory or fuel, or answered something unusable.
    PluginFailed,
    /// The tenant's plugin decided that this event is not to be sent.
    PluginDropped,
    /// The URL leads where webhooks may not go; nothing was sent.
    TargetRefused,
    /// Whoever made the attempt died in it: the receiver may have got it or not.
    Interrupted,
}

impl Outcome {
    /// The outcome of a whole answer with `status`; `retry_after` counts for a 429 only.
    pub fn of_status(status: u16, retry_after: Option<Duration>) -> Self {
        match status {
            200..=299 => Self::Delivered,
            410 => Self::Gone,
            429 => Self::Throttled {
                retry_after: retry_after.filter(|wait| !wait.is_zero()),
            },
            400..=499 => Self::Rejected { status },
            _ => Self::Failed,
        }
    }

    /// The outcome of an answer that broke off or was not whole in time. What its head said may not be
    /// what it was about to say, but for the wait it asked for.
    pub fn of_broken(status: u16, retry_after: Option<Duration>) -> Self {
        match Self::of_status(status, retry_after) {
            throttled @ Self::Throttled { .. } => throttled,
            _ => Self::Failed,
        }
    }

    /// Whether the receiver named the time of the next attempt.
    pub fn asks_to_wait(&self) -> bool {
        matches!(self, Self::Throttled { retry_after } if retry_after.is_some())
    }
}

/// Why a delivery became a dead letter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DeadReason {
    /// The attempt after the last rung failed too.
    Exhausted,
    /// The receiver answered 410.
    Gone,
    /// The receiver answered a 4xx that a repetition cannot change.
    Rejected,
    /// The URL leads where webhooks may not go.
    TargetNotAllowed,
}

impl DeadReason {
    /// The stable name: stored, shown and filtered by.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Exhausted => "exhausted",
            Self::Gone => "gone",
            Self::Rejected => "rejected",
            Self::TargetNotAllowed => "target_not_allowed",
        }
    }
}

/// What happens to a delivery after an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Nothing more: it was delivered, or its plugin dropped it.
    Done,
    /// Another attempt.
    At {
        /// Time from the end of this attempt to the next one.
        delay: Duration,
    },
    /// This step of the ladder once more, at once: what came of it is not known.
    Again,
    /// A dead letter: nothing more is sent by itself.
    Dead {
        /// Why.
        reason: DeadReason,
        /// Whether the endpoint asked for no further webhooks and is to be disabled.
        disable_endpoint: bool,
    },
}

/// Decides what follows attempt `number` (1 for the first) that ended in `outcome`.
///
/// `ladder` holds the delays after attempts 1, 2, 3, …; there is one attempt more than delays.
pub fn next(outcome: &Outcome, number: u32, ladder: &[Duration]) -> Next {
    let dead = |reason| Next::Dead {
        reason,
        disable_endpoint: reason == DeadReason::Gone,
    };
    let asked = match outcome {
        Outcome::Delivered | Outcome::PluginDropped => return Next::Done,
        Outcome::Gone => return dead(DeadReason::Gone),
        Outcome::Rejected { .. } => return dead(DeadReason::Rejected),
        Outcome::TargetRefused => return dead(DeadReason::TargetNotAllowed),
        Outcome::Interrupted => return Next::Again,
        Outcome::Failed | Outcome::PluginFailed => None,
        Outcome::Throttled { retry_after } => *retry_after,
    };
    let rung = usize::try_from(number.saturating_sub(1)).unwrap_or(usize::MAX);
    match ladder.get(rung) {
        None => dead(DeadReason::Exhausted),
        Some(step) => Next::At {
            delay: asked.map_or(*step, |wait| wait.min(MAX_RETRY_AFTER)),
        },
    }
}

/// Reads a `Retry-After` value, seconds or an HTTP-date, as the wait counted from `now`.
///
/// The wait is whole seconds and never shorter than asked. A date that has passed is no wait;
/// anything that is neither form is `None`. More seconds than fit are as many as fit.
pub fn parse_retry_after(value: &[u8], now: SystemTime) -> Option<Duration> {
    let text = std::str::from_utf8(value).ok()?.trim_matches([' ', '\t']);
    if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()) {
        return Some(Duration::from_secs(text.parse().unwrap_or(u64::MAX)));
    }
    let date = httpdate::parse_http_date(text).ok()?;
    let wait = date.duration_since(now).unwrap_or_default();
    let begun = u64::from(wait.subsec_nanos() > 0);
    Some(Duration::from_secs(wait.as_secs().saturating_add(begun)))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MINUTE: Duration = Duration::from_mins(1);
    const LADDER: [Duration; 4] = [
        MINUTE,
        Duration::from_mins(15),
        Duration::from_hours(1),
        Duration::from_hours(24),
    ];

    const EXHAUSTED: Next = Next::Dead {
        reason: DeadReason::Exhausted,
        disable_endpoint: false,
    };

    fn throttled(seconds: u64) -> Outcome {
        Outcome::Throttled {
            retry_after: Some(Duration::from_secs(seconds)),
        }
    }

    #[test]
    fn a_failure_waits_one_minute_a_quarter_an_hour_a_day_and_is_then_dead() {
        for failure in [
            Outcome::Failed,
            Outcome::PluginFailed,
            Outcome::Throttled { retry_after: None },
        ] {
            let steps: Vec<Next> = (1..=5).map(|n| next(&failure, n, &LADDER)).collect();
            let at = |delay| Next::At { delay };
            assert_eq!(
                steps,
                [
                    at(LADDER[0]),
                    at(LADDER[1]),
                    at(LADDER[2]),
                    at(LADDER[3]),
                    EXHAUSTED
                ],
                "{failure:?}"
            );
        }
    }

    #[test]
    fn each_status_falls_in_its_row_of_the_table() {
        for (status, outcome) in [
            (100, Outcome::Failed),
            (101, Outcome::Failed),
            (200, Outcome::Delivered),
            (204, Outcome::Delivered),
            (299, Outcome::Delivered),
            (301, Outcome::Failed),
            (302, Outcome::Failed),
            (304, Outcome::Failed),
            (400, Outcome::Rejected { status: 400 }),
            (403, Outcome::Rejected { status: 403 }),
            (408, Outcome::Rejected { status: 408 }),
            (410, Outcome::Gone),
            (
                429,
                Outcome::Throttled {
                    retry_after: Some(MINUTE),
                },
            ),
            (499, Outcome::Rejected { status: 499 }),
            (500, Outcome::Failed),
            (503, Outcome::Failed),
            (599, Outcome::Failed),
            (999, Outcome::Failed),
        ] {
            assert_eq!(
                Outcome::of_status(status, Some(MINUTE)),
                outcome,
                "{status}"
            );
        }
    }

    #[test]
    fn an_answer_that_means_never_is_dead_at_the_first_attempt() {
        for (outcome, reason, disable_endpoint) in [
            (Outcome::Gone, DeadReason::Gone, true),
            (
                Outcome::Rejected { status: 403 },
                DeadReason::Rejected,
                false,
            ),
            (Outcome::TargetRefused, DeadReason::TargetNotAllowed, false),
        ] {
            assert_eq!(
                next(&outcome, 1, &LADDER),
                Next::Dead {
                    reason,
                    disable_endpoint
                }
            );
        }
    }

    #[test]
    fn a_retry_after_replaces_the_rung_for_at_most_a_day_and_uses_up_an_attempt() {
        let at = |seconds| Next::At {
            delay: Duration::from_secs(seconds),
        };
        assert_eq!(next(&throttled(120), 1, &LADDER), at(120));
        assert_eq!(next(&throttled(120), 4, &LADDER), at(120));
        assert_eq!(next(&throttled(u64::MAX), 2, &LADDER), at(86_400));
        assert_eq!(next(&throttled(120), 5, &LADDER), EXHAUSTED);
    }

    #[test]
    fn a_wait_of_no_time_is_none() {
        let outcome = Outcome::of_status(429, Some(Duration::ZERO));
        assert_eq!(outcome, Outcome::Throttled { retry_after: None });
        assert!(!outcome.asks_to_wait());
    }

    #[test]
    fn of_a_broken_answer_only_the_wait_it_asked_for_counts() {
        for status in [100, 200, 302, 400, 410, 500] {
            let outcome = Outcome::of_broken(status, Some(MINUTE));
            assert_eq!(outcome, Outcome::Failed, "{status}");
        }
        assert!(Outcome::of_broken(429, Some(MINUTE)).asks_to_wait());
    }

    #[test]
    fn an_empty_ladder_allows_one_attempt() {
        assert_eq!(next(&Outcome::Failed, 1, &[]), EXHAUSTED);
    }

    #[test]
    fn retry_after_takes_seconds_and_the_three_date_forms_and_nothing_else() {
        let now = httpdate::parse_http_date("Sun, 06 Nov 1994 08:48:37 GMT").unwrap();
        let seconds = |n| Some(Duration::from_secs(n));
        for (value, wait) in [
            ("0", seconds(0)),
            ("120", seconds(120)),
            (" 120\t", seconds(120)),
            ("99999999999999999999999", seconds(u64::MAX)),
            ("Sun, 06 Nov 1994 08:49:37 GMT", seconds(60)),
            ("Sunday, 06-Nov-94 08:49:37 GMT", seconds(60)),
            ("Sun Nov  6 08:49:37 1994", seconds(60)),
            ("Sun, 06 Nov 1994 08:48:36 GMT", seconds(0)),
            ("", None),
            ("-1", None),
            ("+1", None),
            ("1.5", None),
            ("1s", None),
            ("soon", None),
            ("Sun, 06 Nov 1994 08:49:37", None),
            ("１２０", None),
        ] {
            assert_eq!(parse_retry_after(value.as_bytes(), now), wait, "{value:?}");
        }
        assert_eq!(parse_retry_after(&[0xff, b'1'], now), None);
    }

    fn outcomes() -> impl Strategy<Value = Outcome> {
        prop_oneof![
            (0u16..1000, any::<Option<u32>>()).prop_map(|(status, wait)| {
                Outcome::of_status(status, wait.map(|s| Duration::from_secs(s.into())))
            }),
            Just(Outcome::PluginFailed),
            Just(Outcome::PluginDropped),
            Just(Outcome::TargetRefused),
        ]
    }

    proptest! {
        #[test]
        fn no_delivery_is_attempted_more_than_once_beyond_its_rungs(
            outcome in outcomes(),
            number in any::<u32>(),
            rungs in prop::collection::vec(0u64..200_000, 0..8),
        ) {
            let ladder: Vec<Duration> = rungs.iter().map(|s| Duration::from_secs(*s)).collect();
            if let Next::At { delay } = next(&outcome, number, &ladder) {
                prop_assert!((number as usize) <= ladder.len());
                prop_assert!(delay <= MAX_RETRY_AFTER || ladder.contains(&delay));
            }
        }

        #[test]
        fn only_a_410_disables_the_endpoint(outcome in outcomes(), number in 1u32..10) {
            let disables = matches!(
                next(&outcome, number, &LADDER),
                Next::Dead { disable_endpoint: true, .. }
            );
            prop_assert_eq!(disables, outcome == Outcome::Gone);
        }

        #[test]
        fn a_date_is_never_met_early_and_missed_by_less_than_a_second(
            now_nanos in 0u64..4_000_000_000_000_000_000,
            ahead in 0u64..1_000_000,
        ) {
            let now = SystemTime::UNIX_EPOCH + Duration::from_nanos(now_nanos);
            let date = SystemTime::UNIX_EPOCH
                + Duration::from_secs(now_nanos / 1_000_000_000 + 1 + ahead);
            let text = httpdate::fmt_http_date(date);
            let wait = parse_retry_after(text.as_bytes(), now).unwrap();
            prop_assert!(now + wait >= date);
            prop_assert!(now + wait < date + Duration::from_secs(1));
        }

        #[test]
        fn no_bytes_make_the_parser_panic(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
            let _ = parse_retry_after(&bytes, SystemTime::now());
        }
    }
}
