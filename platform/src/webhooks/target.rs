//! Where webhooks may go. Tenants choose the URL and this server sends from inside its own network,
//! so without a guard every internal service would be a click away (server-side request forgery).
//!
//! The guard stands at three doors. [`parse_target`] refuses at creation what can be told from the
//! text alone; [`check`] repeats that before each attempt, because literal addresses never meet a
//! resolver and the policy may have changed; [`GuardedResolver`] judges names when connecting, refuses
//! if any answer is refused and hands on exactly the addresses that it judged, so that no second
//! lookup can tell another story.

mod address;
mod resolver;

use std::net::{IpAddr, Ipv4Addr};

use url::{Host, Url};

pub use address::{SpecialAddress, special};
#[cfg(test)]
pub(super) use resolver::tests::name_server_with;
pub use resolver::{GuardedResolver, ResolveError};

/// The longest URL of a target, in bytes.
pub const MAX_URL: usize = 2_048;

/// Which targets are allowed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TargetPolicy {
    /// Lets targets be loopback and private addresses (demos, tests, closed networks). All other
    /// special addresses, cloud metadata above all, stay refused.
    pub allow_private: bool,
}

impl TargetPolicy {
    /// Why this policy refuses `ip`; `None` where it is allowed.
    pub fn refuses(self, ip: IpAddr) -> Option<SpecialAddress> {
        use SpecialAddress::{Loopback, Private, Shared};
        special(ip)
            .filter(|kind| !(self.allow_private && matches!(kind, Private | Loopback | Shared)))
    }
}

/// Why a URL cannot be a target. The texts are fit for a tenant to read: they name no address that
/// the tenant did not write, since what a name resolves to inside this network is not theirs to know.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TargetError {
    /// Longer than [`MAX_URL`].
    #[error("the URL is longer than {MAX_URL} bytes")]
    TooLong,
    /// Spaces or control characters, which parsers silently drop.
    #[error("the URL contains spaces or control characters")]
    Characters,
    /// Not a URL.
    #[error("not an absolute URL: {0}")]
    Invalid(#[from] url::ParseError),
    /// Neither https nor http.
    #[error("the URL's scheme is neither https nor http")]
    Scheme,
    /// A user name or password before the host.
    #[error("the URL contains credentials")]
    Credentials,
    /// A fragment, which no request would carry.
    #[error("the URL contains a fragment")]
    Fragment,
    /// No host.
    #[error("the URL has no host")]
    NoHost,
    /// The host is an address, or stands for one, that the policy refuses.
    #[error("the address of the target is not allowed: {0}")]
    Refused(SpecialAddress),
}

/// Reads the URL of a new endpoint and judges all that its text shows. Names other than `localhost`
/// pass: they are judged by what they resolve to when connecting.
pub fn parse_target(url: &str, policy: TargetPolicy) -> Result<Url, TargetError> {
    if url.len() > MAX_URL {
        return Err(TargetError::TooLong);
    }
    if url.chars().any(|c| c.is_whitespace() || c.is_control()) {
        return Err(TargetError::Characters);
    }
    let url = Url::parse(url)?;
    check(&url, policy)?;
    Ok(url)
}

/// Judges all of `url` that can be judged without resolving a name.
pub fn check(url: &Url, policy: TargetPolicy) -> Result<(), TargetError> {
    if !matches!(url.scheme(), "https" | "http") {
        return Err(TargetError::Scheme);
    }
    if !url.username().is_empty() || url.password().is_some() {
        return Err(TargetError::Credentials);
    }
    if url.fragment().is_some() {
        return Err(TargetError::Fragment);
    }
    let ip = match url.host() {
        None => return Err(TargetError::NoHost),
        Some(Host::Ipv4(ip)) => IpAddr::V4(ip),
        Some(Host::Ipv6(ip)) => IpAddr::V6(ip),
        Some(Host::Domain(name)) if is_localhost(name) => IpAddr::V4(Ipv4Addr::LOCALHOST),
        Some(Host::Domain(_)) => return Ok(()),
    };
    policy
        .refuses(ip)
        .map_or(Ok(()), |kind| Err(TargetError::Refused(kind)))
}

/// RFC 6761: `localhost` and all below it. `name` is lower-case, as the URL parser leaves it.
fn is_localhost(name: &str) -> bool {
    let name = name.strip_suffix('.').unwrap_or(name);
    name == "localhost" || name.ends_with(".localhost")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const STRICT: TargetPolicy = TargetPolicy {
        allow_private: false,
    };
    const OPEN: TargetPolicy = TargetPolicy {
        allow_private: true,
    };

    #[test]
    fn allowing_private_targets_allows_loopback_and_private_ones_only() {
        for ip in [
            "127.0.0.1",
            "::1",
            "10.0.0.1",
            "192.168.1.1",
            "100.64.0.1",
            "fd12::1",
        ] {
            assert_eq!(OPEN.refuses(ip.parse().unwrap()), None, "{ip}");
        }
        for ip in [
            "169.254.169.254",
            "100.100.100.200",
            "fd00:ec2::254",
            "169.254.1.1",
            "fe80::1",
            "0.0.0.0",
            "224.0.0.1",
            "::ffff:127.0.0.1",
            "64:ff9b::7f00:1",
        ] {
            assert!(OPEN.refuses(ip.parse().unwrap()).is_some(), "{ip}");
        }
    }

    #[test]
    fn a_literal_address_is_refused_however_it_is_written() {
        for (host, kind) in [
            ("127.0.0.1", SpecialAddress::Loopback),
            ("127.1", SpecialAddress::Loopback),
            ("127.0.0.1.", SpecialAddress::Loopback),
            ("0x7f.1", SpecialAddress::Loopback),
            ("0x7f000001", SpecialAddress::Loopback),
            ("2130706433", SpecialAddress::Loopback),
            ("017700000001", SpecialAddress::Loopback),
            ("0177.0.0.1", SpecialAddress::Loopback),
            ("１２７.0.0.1", SpecialAddress::Loopback),
            ("127%2e0.0.1", SpecialAddress::Loopback),
            ("[::1]", SpecialAddress::Loopback),
            ("0", SpecialAddress::Unspecified),
            ("3232235521", SpecialAddress::Private),
            ("0xa9fea9fe", SpecialAddress::Metadata),
            ("[::ffff:127.0.0.1]", SpecialAddress::Ipv4InIpv6),
            ("[::ffff:7f00:1]", SpecialAddress::Ipv4InIpv6),
            ("[::127.0.0.1]", SpecialAddress::Ipv4InIpv6),
            ("[64:ff9b::7f00:1]", SpecialAddress::Nat64),
            ("[2002:7f00:1::]", SpecialAddress::SixToFour),
            ("[fd00:ec2::254]", SpecialAddress::Metadata),
            ("localhost", SpecialAddress::Loopback),
            ("LocalHost.", SpecialAddress::Loopback),
            ("api.localhost", SpecialAddress::Loopback),
        ] {
            for url in [
                format!("http://{host}/"),
                format!("https://{host}:8443/hook?a=b"),
            ] {
                assert_eq!(
                    parse_target(&url, STRICT),
                    Err(TargetError::Refused(kind)),
                    "{url}"
                );
            }
        }
    }

    #[test]
    fn public_addresses_and_names_are_accepted() {
        for url in [
            "https://example.com/hook",
            "http://example.com:8080/hook?token=a%20b",
            "https://8.8.8.8/",
            "https://[2606:4700:4700::1111]/",
            "https://b\u{fc}cher.example/",
            "https://localhost.example.com/",
            "https://notlocalhost/",
        ] {
            assert!(parse_target(url, STRICT).is_ok(), "{url}");
        }
        assert!(parse_target("http://localhost:3000/", OPEN).is_ok());
        assert!(parse_target("http://127.0.0.1:3000/", OPEN).is_ok());
    }

    #[test]
    fn a_url_that_is_no_plain_web_address_is_refused_under_every_policy() {
        let long = format!("https://example.com/{}", "a".repeat(MAX_URL));
        for policy in [STRICT, OPEN] {
            for (url, error) in [
                (long.as_str(), TargetError::TooLong),
                ("https://exam\nple.com/", TargetError::Characters),
                (" https://example.com/", TargetError::Characters),
                ("https://example.com/\u{a0}", TargetError::Characters),
                (
                    "example.com",
                    TargetError::Invalid(url::ParseError::RelativeUrlWithoutBase),
                ),
                (
                    "",
                    TargetError::Invalid(url::ParseError::RelativeUrlWithoutBase),
                ),
                ("https://", TargetError::Invalid(url::ParseError::EmptyHost)),
                (
                    "https://1.2.3.4.5/",
                    TargetError::Invalid(url::ParseError::InvalidIpv4Address),
                ),
                ("ftp://example.com/", TargetError::Scheme),
                ("file:///etc/passwd", TargetError::Scheme),
                ("gopher://example.com/", TargetError::Scheme),
                ("data:text/plain,hi", TargetError::Scheme),
                ("https://user@example.com/", TargetError::Credentials),
                ("https://:pass@example.com/", TargetError::Credentials),
                ("https://example.com#@evil.example/", TargetError::Fragment),
                ("https://example.com/#", TargetError::Fragment),
            ] {
                assert_eq!(parse_target(url, policy), Err(error), "{url:?}");
            }
        }
    }

    proptest! {
        #[test]
        fn no_text_makes_the_parser_panic_and_what_it_accepts_it_accepts_again(text in ".{0,80}") {
            if let Ok(url) = parse_target(&format!("http://{text}"), STRICT) {
                prop_assert!(parse_target(url.as_str(), STRICT).is_ok());
            }
        }
    }
}
