//! The server and its stores, and how the steps happen to them.

use super::model::{Body, Circumstances, Database, Model, Verdict};
use super::{Moment, Step};
use crate::harness::api::{Answer, Api};
use crate::harness::server::{Setup, TestServer};
use crate::harness::tcp_proxy::Wire;
use crate::harness::{Backend, DEADLINE, eventually};
use crate::idempotency::whole_contacts;
use std::time::{Duration, Instant};
use tokio::task::JoinHandle;

/// Short enough to wait for its end.
const LEASE: (&str, &str) = ("BOTIX_IDEMPOTENCY__LEASE", "1s");

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Redis {
    Absent,
    Up,
    Paused,
    Killed,
}

pub struct World {
    backend: Backend,
    server: TestServer,
    is_running: bool,
    is_cut: bool,
    redis: Redis,
    /// Redis was lost while it was up, as a busy machine may make it seem.
    redis_wavers: bool,
    /// A project beside the cases', to see whether the server reaches its database.
    bystander: Api,
    played: usize,
}

/// One case: a project, what is known of it, and the last request.
struct Case {
    api: Api,
    model: Model,
    last: Option<(usize, Body)>,
}

type Client = JoinHandle<Result<Answer, reqwest::Error>>;

impl World {
    pub async fn new(backend: Backend) -> Self {
        let setup = Setup::new(backend).await.wired().await;
        let redis = match backend {
            Backend::PostgresAndRedis => Redis::Up,
            Backend::Sqlite | Backend::Postgres => Redis::Absent,
        };
        let server = setup.env(LEASE.0, LEASE.1).start().await;
        Self {
            backend,
            bystander: server.project("bystander").await.api,
            server,
            is_running: true,
            is_cut: false,
            redis,
            redis_wavers: false,
            played: 0,
        }
    }

    /// Plays a case to its end, whatever an earlier one left behind.
    pub async fn play(&mut self, steps: &[Step]) -> Verdict {
        self.restore_all().await;
        self.played += 1;
        let api = self
            .server
            .project(&format!("case {}", self.played))
            .await
            .api;
        let mut case = Case {
            model: Model::new(&api).await,
            api,
            last: None,
        };
        for (at, step) in steps.iter().enumerate() {
            let verdict = self.step(&mut case, *step).await;
            verdict.map_err(|reason| format!("step {}, {step:?}: {reason}", at + 1))?;
        }
        self.restore_all().await;
        let verdict = self.ask_again(&mut case).await;
        verdict.map_err(|reason| format!("asked again at the end: {reason}"))?;
        let mut rows = whole_contacts(&case.api).await;
        rows.sort();
        if rows == case.model.ids() {
            return Ok(());
        }
        Err(format!("contacts {rows:?}, not {:?}", case.model.ids()))
    }

    /// Settles what is unknown, and sees that every answer is replayed.
    async fn ask_again(&mut self, case: &mut Case) -> Verdict {
        self.settle(case).await?;
        for (key, body) in case.model.answered() {
            self.send(case, key, body).await?;
        }
        Ok(())
    }

    async fn step(&mut self, case: &mut Case, step: Step) -> Verdict {
        match step {
            Step::Send(key, body) => self.send(case, key, body).await?,
            Step::SendParallel(key, body, n) => self.send_parallel(case, key, body, n).await?,
            Step::Retry => {
                if let Some((key, body)) = case.last {
                    self.send(case, key, body).await?;
                }
            }
            Step::Crash => {
                self.kill().await;
                self.restart().await;
            }
            Step::CrashDuring(key, body, moment) => {
                self.crash_during(case, key, body, moment).await?;
            }
            Step::CutDatabase => self.cut().await,
            Step::CutDatabaseDuring(key, body, moment) => {
                self.cut_during(case, key, body, moment).await?;
            }
            Step::RestoreDatabase => self.restore_database().await,
            Step::FlushRedis if self.redis == Redis::Up => self.server.redis().flush().await,
            Step::KillRedis if self.redis == Redis::Up => {
                self.server.redis().kill9();
                self.redis = Redis::Killed;
            }
            Step::PauseRedis if self.redis == Redis::Up => {
                self.server.redis().pause();
                self.redis = Redis::Paused;
            }
            Step::RestoreRedis => self.restore_redis().await,
            Step::LeasesEnd if self.redis == Redis::Up => self.leases_end(case).await,
            Step::RecordsExpire if !self.is_cut => self.records_expire(case).await?,
            Step::FlushRedis
            | Step::KillRedis
            | Step::PauseRedis
            | Step::LeasesEnd
            | Step::RecordsExpire => {}
        }
        Ok(())
    }

    fn begin(&self, case: &mut Case, key: usize, body: Body) -> Client {
        case.last = Some((key, body));
        if self.redis == Redis::Paused || self.redis_wavers {
            // A command that outlasted its sender's patience has its effect when Redis goes on.
            case.model.may_be_held(key);
        }
        tokio::spawn(case.model.request(&case.api, key, body).try_send())
    }

    async fn send(&mut self, case: &mut Case, key: usize, body: Body) -> Verdict {
        self.send_parallel(case, key, body, 1).await
    }

    async fn send_parallel(
        &mut self,
        case: &mut Case,
        key: usize,
        body: Body,
        n: usize,
    ) -> Verdict {
        let redis_losses = self.redis_losses();
        let clients: Vec<_> = (0..n).map(|_| self.begin(case, key, body)).collect();
        let mut answers = Vec::new();
        for client in clients {
            answers.push(
                client
                    .await
                    .expect("a client")
                    .map_err(|error| format!("no answer, though the server runs: {error:?}"))?,
            );
        }
        // The one that executed first: the others replay it.
        answers.sort_by_key(Answer::is_replay);
        let when = Circumstances {
            in_parallel: n > 1,
            ..self.circumstances(redis_losses)
        };
        for answer in answers {
            case.model.judge(key, body, &answer, when)?;
        }
        Ok(())
    }

    /// Sends a request and lets the moment come; the lock, if one is held, keeps it from its commit.
    async fn until(
        &mut self,
        case: &mut Case,
        key: usize,
        body: Body,
        moment: Moment,
    ) -> (Client, Option<crate::harness::store::Outside>) {
        let lock = match moment {
            Moment::AtWork => Some(self.server.block_contact_writes().await),
            Moment::After(_) => None,
        };
        let mut client = self.begin(case, key, body);
        let moment_comes = async {
            match moment {
                Moment::AtWork => self.server.at_work().await,
                Moment::After(time) => tokio::time::sleep(time).await,
            }
        };
        tokio::select! {
            () = moment_comes => {}
            () = ended(&mut client) => {}
        }
        (client, lock)
    }

    async fn crash_during(
        &mut self,
        case: &mut Case,
        key: usize,
        body: Body,
        moment: Moment,
    ) -> Verdict {
        let redis_losses = self.redis_losses();
        let (client, lock) = self.until(case, key, body, moment).await;
        let could_commit = lock.is_none() && !self.is_cut;
        self.server.kill9();
        self.is_running = false;
        if let Some(lock) = lock {
            lock.release().await;
        }
        let answer = client.await.expect("a client");
        self.sessions_end().await;
        let when = self.circumstances(redis_losses);
        self.restart().await;
        if self.redis != Redis::Absent {
            case.model.may_be_held(key);
        }
        if let Ok(answer) = answer {
            return case.model.judge(key, body, &answer, when);
        }
        case.model.unanswered(key, body, could_commit);
        Ok(())
    }

    async fn cut_during(
        &mut self,
        case: &mut Case,
        key: usize,
        body: Body,
        moment: Moment,
    ) -> Verdict {
        if self.is_cut {
            return self.send(case, key, body).await;
        }
        let redis_losses = self.redis_losses();
        let (client, lock) = self.until(case, key, body, moment).await;
        let could_commit = lock.is_none();
        self.server.to_postgres().set(Wire::Cut);
        self.is_cut = true;
        if let Some(lock) = lock {
            lock.release().await;
        }
        let answer = client.await.expect("a client");
        let answer =
            answer.map_err(|error| format!("no answer, though the server runs: {error:?}"))?;
        self.sessions_end().await;
        let mut when = self.circumstances(redis_losses);
        if answer.status != 503 || could_commit {
            when.database = Database::LostMeanwhile;
        }
        case.model.judge(key, body, &answer, when)
    }

    /// Asks for every key that is unknown until it is not.
    async fn settle(&mut self, case: &mut Case) -> Verdict {
        if self.redis != Redis::Absent {
            self.leases_end(case).await;
        }
        let start = Instant::now();
        while let Some((key, body)) = case.model.unsettled() {
            self.send(case, key, body).await?;
            if start.elapsed() > DEADLINE {
                return Err(format!("a key is stuck: {:?}", case.last));
            }
        }
        Ok(())
    }

    fn circumstances(&mut self, redis_losses: usize) -> Circumstances {
        let redis_failed = self.redis_losses() > redis_losses;
        self.redis_wavers |= redis_failed && self.redis == Redis::Up;
        Circumstances {
            in_parallel: false,
            database: if self.is_cut {
                Database::OutOfReach
            } else {
                Database::InReach
            },
            redis_failed,
        }
    }

    async fn kill(&mut self) {
        self.server.kill9();
        self.is_running = false;
        self.sessions_end().await;
    }

    /// Starts the server again; it needs its database for that.
    async fn restart(&mut self) {
        if self.is_cut {
            self.server.to_postgres().set(Wire::Whole);
            self.is_cut = false;
        }
        self.server.restart().await;
        self.is_running = true;
    }

    async fn cut(&mut self) {
        self.server.to_postgres().set(Wire::Cut);
        self.is_cut = true;
        self.sessions_end().await;
    }

    /// Waits until `PostgreSQL` has seen the end of every session of the server, and so holds nothing
    /// for it.
    async fn sessions_end(&self) {
        if self.backend == Backend::Sqlite {
            return;
        }
        let mut outside = self.server.outside().await;
        eventually("the sessions end", async || {
            let sessions = outside
                .number(
                    "SELECT count(*) FROM pg_stat_activity \
                     WHERE datname = current_database() AND application_name = 'botix'",
                )
                .await;
            (sessions == 0).then_some(())
        })
        .await;
    }

    async fn restore_database(&mut self) {
        if !self.is_cut {
            return;
        }
        self.server.to_postgres().set(Wire::Whole);
        self.is_cut = false;
        self.is_reached().await;
    }

    /// Waits until the server answers out of its database.
    async fn is_reached(&self) {
        eventually("the server reaches its database", async || {
            let answer = self.bystander.get("/contacts").send().await;
            (answer.status == 200).then_some(())
        })
        .await;
    }

    async fn restore_redis(&mut self) {
        match self.redis {
            Redis::Absent | Redis::Up => return,
            Redis::Paused => self.server.redis().resume(),
            Redis::Killed => self.server.redis().restart().await,
        }
        self.redis = Redis::Up;
        assert_eq!(self.server.redis().command("PING").await, "+PONG");
    }

    async fn restore_all(&mut self) {
        self.restore_redis().await;
        if !self.is_running {
            self.restart().await;
        }
        self.restore_database().await;
    }

    /// Waits until no lease is left in Redis; then nobody holds a key any longer.
    async fn leases_end(&mut self, case: &mut Case) {
        let count = "EVAL \"local n = 0 \
                     for _, k in ipairs(redis.call('KEYS', 'botix:idempotency:*')) do \
                     if string.sub(redis.call('GET', k) or '', 1, 6) == 'lease:' then n = n + 1 end \
                     end return n\" 0";
        eventually("the leases end", async || {
            (self.server.redis().command(count).await == ":0").then_some(())
        })
        .await;
        self.redis_wavers = false;
        case.model.leases_ended();
    }

    /// Lets every record have had its time. The server is down meanwhile, so that it cannot leave a copy
    /// of an answer in Redis afterwards.
    async fn records_expire(&mut self, case: &mut Case) -> Verdict {
        self.restore_redis().await;
        self.settle(case).await?;
        self.kill().await;
        let past = "UPDATE idempotency_records SET expires_at =";
        self.server
            .execute(
                &format!("{past} now() - INTERVAL '1 second'"),
                &format!("{past} 1"),
            )
            .await;
        if self.redis == Redis::Up {
            self.server.redis().flush().await;
        }
        self.restart().await;
        case.model.records_expired();
        Ok(())
    }

    /// How often the server has found Redis out of reach.
    fn redis_losses(&self) -> usize {
        self.server
            .stderr()
            .matches("Redis is out of reach")
            .count()
    }
}

async fn ended(client: &mut Client) {
    while !client.is_finished() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}
