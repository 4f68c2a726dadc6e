//! Name resolution that answers only with addresses a webhook may be sent to.
//!
//! The connector receives its addresses from here and nowhere else, so what was judged is what is
//! connected to, and a name that changes its answer between two lookups gains nothing. One refused
//! address refuses the name: a mixed answer is an attack or a mistake, and trying the public half of
//! it would hide both.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use hickory_resolver::TokioResolver;
use hickory_resolver::config::{
    ConnectionConfig, LookupIpStrategy, NameServerConfig, ResolverConfig,
};
use hickory_resolver::net::NetError;
use hickory_resolver::net::runtime::TokioRuntimeProvider;
use hickory_resolver::proto::rr::Name as DnsName;
use reqwest::dns::{Addrs, Name, Resolve, Resolving};

use super::{TargetError, TargetPolicy};

/// How long an answer, also a negative one, is believed at most, whatever its time to live: a
/// receiver that moves is found again before the ladder's second rung.
const MAX_TTL: Duration = Duration::from_mins(1);

/// A resolver that judges what it finds. Cheap to clone; clones share one cache.
#[derive(Clone)]
pub struct GuardedResolver {
    resolver: TokioResolver,
    policy: TargetPolicy,
    timeout: Duration,
}

/// Why a name gave no addresses.
#[derive(Debug, thiserror::Error)]
pub enum ResolveError {
    /// The name has an address that the policy refuses.
    #[error(transparent)]
    Refused(#[from] TargetError),
    /// No name server answered in time.
    #[error("no answer from the name servers in {0:?}")]
    Timeout(Duration),
    /// The name does not exist.
    #[error("the name does not exist")]
    NoSuchName,
    /// The name exists and has no address.
    #[error("the name has no address")]
    NoAddress,
    /// The name servers gave an error or could not be asked.
    #[error("the lookup failed: {0}")]
    Lookup(NetError),
}

impl From<NetError> for ResolveError {
    fn from(error: NetError) -> Self {
        if error.is_nx_domain() {
            Self::NoSuchName
        } else if error.is_no_records_found() {
            Self::NoAddress
        } else {
            Self::Lookup(error)
        }
    }
}

impl GuardedResolver {
    /// A resolver with the system's hosts file and name servers, or with the given ones. A lookup
    /// ends after `timeout`.
    pub fn new(
        policy: TargetPolicy,
        timeout: Duration,
        name_servers: Option<&[SocketAddr]>,
    ) -> Result<Self, NetError> {
        let with = |servers| {
            let config = ResolverConfig::from_name_servers(servers);
            TokioResolver::builder_with_config(config, TokioRuntimeProvider::default())
        };
        let mut builder = match name_servers {
            Some(servers) => with(servers.iter().copied().map(name_server).collect()),
            None => TokioResolver::builder_tokio().unwrap_or_else(|error| {
                tracing::warn!(%error, "no system name servers: only the hosts file resolves names");
                with(Vec::new())
            }),
        };
        let options = builder.options_mut();
        options.ip_strategy = LookupIpStrategy::Ipv6AndIpv4;
        options.positive_max_ttl = Some(MAX_TTL);
        options.negative_max_ttl = Some(MAX_TTL);
        Ok(Self {
            resolver: builder.build()?,
            policy,
            timeout,
        })
    }

    /// All addresses of `host`, every one of them allowed.
    pub async fn lookup(&self, host: &str) -> Result<Vec<IpAddr>, ResolveError> {
        let name = self.question(host)?;
        let found = tokio::time::timeout(self.timeout, self.resolver.lookup_ip(name))
            .await
            .map_err(|_| ResolveError::Timeout(self.timeout))??;
        let addresses: Vec<IpAddr> = found.iter().collect();
        if addresses.is_empty() {
            return Err(ResolveError::NoAddress);
        }
        for address in &addresses {
            if let Some(kind) = self.policy.refuses(*address) {
                tracing::debug!(host, %address, %kind, "target refused");
                return Err(TargetError::Refused(kind).into());
            }
        }
        Ok(addresses)
    }

    /// A tenant's name is looked up as it stands and never completed with this machine's search
    /// domains, which would lead inside. Where private targets are allowed, inside is meant. The name
    /// comes from a URL, hence in ASCII, and need not be a host name in the strict sense.
    fn question(&self, host: &str) -> Result<DnsName, NetError> {
        let mut name = DnsName::from_ascii(host)?;
        if !self.policy.allow_private {
            name.set_fqdn(true);
        }
        Ok(name)
    }
}

fn name_server(address: SocketAddr) -> NameServerConfig {
    let connections = [ConnectionConfig::udp(), ConnectionConfig::tcp()]
        .into_iter()
        .map(|mut connection| {
            connection.port = address.port();
            connection
        })
        .collect();
    NameServerConfig::new(address.ip(), true, connections)
}

impl Resolve for GuardedResolver {
    fn resolve(&self, name: Name) -> Resolving {
        let this = self.clone();
        Box::pin(async move {
            let addresses = this.lookup(name.as_str()).await?;
            let addresses: Addrs = Box::new(
                addresses
                    .into_iter()
                    .map(|address| SocketAddr::new(address, 0)),
            );
            Ok(addresses)
        })
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::collections::HashMap;
    use std::sync::{Arc, Mutex};

    use hickory_resolver::proto::op::{Message, ResponseCode};
    use hickory_resolver::proto::rr::{RData, Record, RecordType};
    use tokio::net::UdpSocket;

    use super::*;

    /// A name server on loopback. Each question about a name takes the next of its answers, and the
    /// last one stays; names it does not have do not exist. Nothing may be cached.
    pub(crate) async fn name_server_with(names: &[(&str, &[&[&str]])]) -> SocketAddr {
        let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let address = socket.local_addr().unwrap();
        let names: HashMap<String, Vec<Vec<IpAddr>>> = names
            .iter()
            .map(|(name, answers)| {
                let parse =
                    |answer: &&[&str]| answer.iter().map(|ip| ip.parse().unwrap()).collect();
                (format!("{name}."), answers.iter().map(parse).collect())
            })
            .collect();
        let asked: Arc<Mutex<HashMap<(String, RecordType), usize>>> = Arc::default();
        tokio::spawn(async move {
            let mut packet = [0; 1500];
            while let Ok((len, client)) = socket.recv_from(&mut packet).await {
                let question = Message::from_vec(&packet[..len]).unwrap();
                let query = question.queries[0].clone();
                let name = query.name().to_ascii();
                let mut answer = Message::response(question.metadata.id, question.metadata.op_code);
                answer.metadata.recursion_available = true;
                match names.get(&name) {
                    None => answer.metadata.response_code = ResponseCode::NXDomain,
                    Some(answers) => {
                        let mut asked = asked.lock().unwrap();
                        let turn = asked.entry((name, query.query_type())).or_default();
                        let current = &answers[(*turn).min(answers.len() - 1)];
                        *turn += 1;
                        for data in current.iter().map(|ip| RData::from(*ip)) {
                            if data.record_type() == query.query_type() {
                                answer.add_answer(Record::from_rdata(
                                    query.name().clone(),
                                    0,
                                    data,
                                ));
                            }
                        }
                    }
                }
                answer.add_query(query);
                let _ = socket.send_to(&answer.to_vec().unwrap(), client).await;
            }
        });
        address
    }

    fn resolver(allow_private: bool, server: SocketAddr) -> GuardedResolver {
        let policy = TargetPolicy { allow_private };
        GuardedResolver::new(policy, Duration::from_secs(5), Some(&[server])).unwrap()
    }

    fn refused(found: Result<Vec<IpAddr>, ResolveError>) -> Option<String> {
        match found {
            Err(ResolveError::Refused(error)) => Some(error.to_string()),
            _ => None,
        }
    }

    #[tokio::test]
    async fn public_answers_are_handed_on_as_they_are() {
        let public: &[&str] = &["8.8.8.8", "9.9.9.9", "2606:4700:4700::1111"];
        let server = name_server_with(&[("hook.example", &[public])]).await;
        let mut found = resolver(false, server)
            .lookup("hook.example")
            .await
            .unwrap();
        found.sort_unstable();
        let expected: Vec<IpAddr> = public.iter().map(|ip| ip.parse().unwrap()).collect();
        assert_eq!(found, expected);
    }

    #[tokio::test]
    async fn names_that_only_dns_allows_are_looked_up_too() {
        let names = [
            "with_underscore.example",
            "xn--bcher-kva.example",
            "1a.example",
        ];
        let answer: &[&[&str]] = &[&["8.8.8.8"]];
        let server = name_server_with(&names.map(|name| (name, answer))).await;
        for name in names {
            let found = resolver(false, server).lookup(name).await.unwrap();
            assert_eq!(found, ["8.8.8.8".parse::<IpAddr>().unwrap()], "{name}");
        }
    }

    #[tokio::test]
    async fn search_domains_complete_a_name_only_where_private_targets_are_allowed() {
        let server = name_server_with(&[]).await;
        for allow_private in [false, true] {
            let name = resolver(allow_private, server).question("db").unwrap();
            assert_eq!(name.is_fqdn(), !allow_private);
        }
    }

    #[tokio::test]
    async fn one_refused_address_among_the_answers_refuses_the_name() {
        let server = name_server_with(&[
            ("mixed.example", &[&["8.8.8.8", "10.0.0.1"]]),
            ("mixed6.example", &[&["8.8.8.8", "::1"]]),
            ("nat64.example", &[&["64:ff9b::7f00:1"]]),
            ("mapped.example", &[&["::ffff:127.0.0.1"]]),
            ("metadata.example", &[&["169.254.169.254"]]),
        ])
        .await;
        let resolver = resolver(false, server);
        for (name, detail) in [
            (
                "mixed.example",
                "the address of the target is not allowed: private",
            ),
            (
                "mixed6.example",
                "the address of the target is not allowed: loopback",
            ),
            (
                "nat64.example",
                "the address of the target is not allowed: NAT64",
            ),
            (
                "mapped.example",
                "the address of the target is not allowed: IPv4-in-IPv6",
            ),
            (
                "metadata.example",
                "the address of the target is not allowed: metadata",
            ),
            (
                "localhost",
                "the address of the target is not allowed: loopback",
            ),
        ] {
            assert_eq!(
                refused(resolver.lookup(name).await).as_deref(),
                Some(detail),
                "{name}"
            );
        }
    }

    #[tokio::test]
    async fn a_name_that_turns_private_after_its_first_answer_is_refused_from_then_on() {
        let server = name_server_with(&[("rebind.example", &[&["8.8.8.8"], &["127.0.0.1"]])]).await;
        let resolver = resolver(false, server);
        let first = resolver.lookup("rebind.example").await.unwrap();
        assert_eq!(first, ["8.8.8.8".parse::<IpAddr>().unwrap()]);
        assert!(refused(resolver.lookup("rebind.example").await).is_some());
    }

    #[tokio::test]
    async fn private_answers_pass_where_the_policy_allows_them() {
        let server = name_server_with(&[("inside.example", &[&["10.1.2.3"]])]).await;
        let found = resolver(true, server)
            .lookup("inside.example")
            .await
            .unwrap();
        assert_eq!(found, ["10.1.2.3".parse::<IpAddr>().unwrap()]);
    }

    #[tokio::test]
    async fn a_name_without_addresses_and_one_that_does_not_exist_are_told_apart() {
        let server = name_server_with(&[("empty.example", &[&[]])]).await;
        let resolver = resolver(false, server);
        for (name, detail) in [
            ("empty.example", "the name has no address"),
            ("missing.example", "the name does not exist"),
            ("nope.invalid", "the name does not exist"),
        ] {
            let error = resolver.lookup(name).await.unwrap_err();
            assert_eq!(error.to_string(), detail, "{name}");
        }
        for name in ["-", "a..b"] {
            let malformed = resolver.lookup(name).await;
            assert!(
                matches!(malformed, Err(ResolveError::Lookup(_))),
                "{name}: {malformed:?}"
            );
        }
    }

    #[tokio::test]
    async fn a_name_server_that_never_answers_is_given_up_on() {
        let silent = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let resolver = GuardedResolver::new(
            TargetPolicy::default(),
            Duration::from_millis(50),
            Some(&[silent.local_addr().unwrap()]),
        )
        .unwrap();
        let found = resolver.lookup("hook.example").await;
        assert!(matches!(found, Err(ResolveError::Timeout(_))), "{found:?}");
    }
}
