//! Which addresses are not places on the public internet, by what they are.
//!
//! Two tables, first match first, from the IANA registries of special-purpose addresses; IPv6 outside
//! the global unicast space is special as a whole, so a range yet to be assigned fails safe.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::{Ipv4Net, Ipv6Net};

/// What makes an address no place on the public internet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpecialAddress {
    /// RFC 1918, or an IPv6 unique local address.
    Private,
    /// This host.
    Loopback,
    /// Carrier-grade NAT, `100.64.0.0/10`.
    Shared,
    /// This network segment.
    LinkLocal,
    /// The deprecated IPv6 predecessor of private addresses.
    SiteLocal,
    /// A cloud provider's instance metadata, which holds credentials.
    Metadata,
    /// No address: `0.0.0.0/8` and `::`.
    Unspecified,
    /// Many receivers.
    Multicast,
    /// Everyone on this segment.
    Broadcast,
    /// For examples in documentation.
    Documentation,
    /// For benchmarks of network devices.
    Benchmarking,
    /// Discards what it receives.
    Discard,
    /// An IPv4 address written as IPv6: mapped, compatible or translated.
    Ipv4InIpv6,
    /// An IPv4 address behind a NAT64 prefix.
    Nat64,
    /// An IPv4 address behind a 6to4 prefix or relay.
    SixToFour,
    /// An IPv4 address behind a Teredo prefix.
    Teredo,
    /// Reserved, or not assigned as global unicast.
    Reserved,
}

impl SpecialAddress {
    /// The stable name.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Private => "private",
            Self::Loopback => "loopback",
            Self::Shared => "shared",
            Self::LinkLocal => "link-local",
            Self::SiteLocal => "site-local",
            Self::Metadata => "metadata",
            Self::Unspecified => "unspecified",
            Self::Multicast => "multicast",
            Self::Broadcast => "broadcast",
            Self::Documentation => "documentation",
            Self::Benchmarking => "benchmarking",
            Self::Discard => "discard",
            Self::Ipv4InIpv6 => "IPv4-in-IPv6",
            Self::Nat64 => "NAT64",
            Self::SixToFour => "6to4",
            Self::Teredo => "Teredo",
            Self::Reserved => "reserved",
        }
    }
}

impl fmt::Display for SpecialAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

const fn v4(a: u8, b: u8, c: u8, d: u8, prefix: u8) -> Ipv4Net {
    Ipv4Net::new_assert(Ipv4Addr::new(a, b, c, d), prefix)
}

const fn v6(bits: u128, prefix: u8) -> Ipv6Net {
    Ipv6Net::new_assert(Ipv6Addr::from_bits(bits), prefix)
}

/// The first match counts. From the IANA special-purpose registry, and the addresses at which
/// clouds serve metadata: most, Alibaba's, Azure's.
const SPECIAL_V4: &[(Ipv4Net, SpecialAddress)] = &[
    (v4(169, 254, 169, 254, 32), SpecialAddress::Metadata),
    (v4(100, 100, 100, 200, 32), SpecialAddress::Metadata),
    (v4(168, 63, 129, 16, 32), SpecialAddress::Metadata),
    (v4(0, 0, 0, 0, 8), SpecialAddress::Unspecified),
    (v4(10, 0, 0, 0, 8), SpecialAddress::Private),
    (v4(172, 16, 0, 0, 12), SpecialAddress::Private),
    (v4(192, 168, 0, 0, 16), SpecialAddress::Private),
    (v4(100, 64, 0, 0, 10), SpecialAddress::Shared),
    (v4(127, 0, 0, 0, 8), SpecialAddress::Loopback),
    (v4(169, 254, 0, 0, 16), SpecialAddress::LinkLocal),
    (v4(192, 0, 0, 0, 24), SpecialAddress::Reserved),
    (v4(192, 0, 2, 0, 24), SpecialAddress::Documentation),
    (v4(198, 51, 100, 0, 24), SpecialAddress::Documentation),
    (v4(203, 0, 113, 0, 24), SpecialAddress::Documentation),
    (v4(192, 88, 99, 0, 24), SpecialAddress::SixToFour),
    (v4(198, 18, 0, 0, 15), SpecialAddress::Benchmarking),
    (v4(224, 0, 0, 0, 4), SpecialAddress::Multicast),
    (v4(255, 255, 255, 255, 32), SpecialAddress::Broadcast),
    (v4(240, 0, 0, 0, 4), SpecialAddress::Reserved),
];

/// The first match counts. Prefixes that carry an IPv4 address are refused whatever they carry:
/// a public receiver has no need of them.
const SPECIAL_V6: &[(Ipv6Net, SpecialAddress)] = &[
    (
        v6(0xfd00_0ec2_0000_0000_0000_0000_0000_0254, 128),
        SpecialAddress::Metadata,
    ),
    (v6(0, 128), SpecialAddress::Unspecified),
    (v6(1, 128), SpecialAddress::Loopback),
    (v6(0, 96), SpecialAddress::Ipv4InIpv6),
    (v6(0xffff << 32, 96), SpecialAddress::Ipv4InIpv6),
    (v6(0xffff << 48, 96), SpecialAddress::Ipv4InIpv6),
    (v6(0x0064_ff9b << 96, 96), SpecialAddress::Nat64),
    (v6(0x0064_ff9b_0001 << 80, 48), SpecialAddress::Nat64),
    (v6(0x0100 << 112, 64), SpecialAddress::Discard),
    (v6(0x2001_0000 << 96, 32), SpecialAddress::Teredo),
    (v6(0x2001_0002 << 96, 48), SpecialAddress::Benchmarking),
    (v6(0x2001_0db8 << 96, 32), SpecialAddress::Documentation),
    (v6(0x2001 << 112, 23), SpecialAddress::Reserved),
    (v6(0x2002 << 112, 16), SpecialAddress::SixToFour),
    (v6(0x3fff << 112, 20), SpecialAddress::Documentation),
    (v6(0xfc00 << 112, 7), SpecialAddress::Private),
    (v6(0xfe80 << 112, 10), SpecialAddress::LinkLocal),
    (v6(0xfec0 << 112, 10), SpecialAddress::SiteLocal),
    (v6(0xff00 << 112, 8), SpecialAddress::Multicast),
];

const GLOBAL_UNICAST_V6: Ipv6Net = v6(0x2000 << 112, 3);

/// What is special about `ip`; `None` for a place on the public internet.
pub fn special(ip: IpAddr) -> Option<SpecialAddress> {
    match ip {
        IpAddr::V4(ip) => SPECIAL_V4
            .iter()
            .find(|(net, _)| net.contains(&ip))
            .map(|(_, kind)| *kind),
        IpAddr::V6(ip) => SPECIAL_V6
            .iter()
            .find(|(net, _)| net.contains(&ip))
            .map(|(_, kind)| *kind)
            .or_else(|| (!GLOBAL_UNICAST_V6.contains(&ip)).then_some(SpecialAddress::Reserved)),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn kind(ip: &str) -> Option<&'static str> {
        special(ip.parse().unwrap()).map(SpecialAddress::as_str)
    }

    #[test]
    fn every_special_range_is_refused_from_its_first_to_its_last_address() {
        for (first, last, name) in [
            ("0.0.0.0", "0.255.255.255", "unspecified"),
            ("10.0.0.0", "10.255.255.255", "private"),
            ("172.16.0.0", "172.31.255.255", "private"),
            ("192.168.0.0", "192.168.255.255", "private"),
            ("100.64.0.0", "100.127.255.255", "shared"),
            ("127.0.0.0", "127.255.255.255", "loopback"),
            ("169.254.0.0", "169.254.255.255", "link-local"),
            ("169.254.169.254", "169.254.169.254", "metadata"),
            ("168.63.129.16", "168.63.129.16", "metadata"),
            ("100.100.100.200", "100.100.100.200", "metadata"),
            ("192.0.0.0", "192.0.0.255", "reserved"),
            ("192.0.2.0", "192.0.2.255", "documentation"),
            ("198.51.100.0", "198.51.100.255", "documentation"),
            ("203.0.113.0", "203.0.113.255", "documentation"),
            ("192.88.99.0", "192.88.99.255", "6to4"),
            ("198.18.0.0", "198.19.255.255", "benchmarking"),
            ("224.0.0.0", "239.255.255.255", "multicast"),
            ("240.0.0.0", "255.255.255.254", "reserved"),
            ("255.255.255.255", "255.255.255.255", "broadcast"),
            ("::", "::", "unspecified"),
            ("::1", "::1", "loopback"),
            ("::2", "::ffff:ffff", "IPv4-in-IPv6"),
            ("::127.0.0.1", "::10.0.0.1", "IPv4-in-IPv6"),
            ("::ffff:127.0.0.1", "::ffff:8.8.8.8", "IPv4-in-IPv6"),
            ("::ffff:0:127.0.0.1", "::ffff:0:8.8.8.8", "IPv4-in-IPv6"),
            ("64:ff9b::7f00:1", "64:ff9b::808:808", "NAT64"),
            ("64:ff9b:1::", "64:ff9b:1:ffff:ffff:ffff:ffff:ffff", "NAT64"),
            ("100::", "100::ffff:ffff:ffff:ffff", "discard"),
            ("2001::", "2001:0:ffff:ffff:ffff:ffff:ffff:ffff", "Teredo"),
            (
                "2001:2::",
                "2001:2:0:ffff:ffff:ffff:ffff:ffff",
                "benchmarking",
            ),
            (
                "2001:10::",
                "2001:1ff:ffff:ffff:ffff:ffff:ffff:ffff",
                "reserved",
            ),
            (
                "2001:db8::",
                "2001:db8:ffff:ffff:ffff:ffff:ffff:ffff",
                "documentation",
            ),
            (
                "2002:7f00:1::",
                "2002:ffff:ffff:ffff:ffff:ffff:ffff:ffff",
                "6to4",
            ),
            (
                "3fff::",
                "3fff:fff:ffff:ffff:ffff:ffff:ffff:ffff",
                "documentation",
            ),
            ("fd00:ec2::254", "fd00:ec2::254", "metadata"),
            (
                "fc00::",
                "fdff:ffff:ffff:ffff:ffff:ffff:ffff:ffff",
                "private",
            ),
            (
                "fe80::",
                "febf:ffff:ffff:ffff:ffff:ffff:ffff:ffff",
                "link-local",
            ),
            (
                "fec0::",
                "feff:ffff:ffff:ffff:ffff:ffff:ffff:ffff",
                "site-local",
            ),
            (
                "ff00::",
                "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff",
                "multicast",
            ),
            ("1::", "1fff::", "reserved"),
            ("4000::", "fbff::", "reserved"),
        ] {
            assert_eq!(
                (kind(first), kind(last)),
                (Some(name), Some(name)),
                "{first}-{last}"
            );
        }
    }

    #[test]
    fn the_neighbours_of_special_ranges_are_public() {
        for ip in [
            "1.0.0.0",
            "8.8.8.8",
            "9.255.255.255",
            "11.0.0.0",
            "100.63.255.255",
            "100.128.0.0",
            "126.255.255.255",
            "128.0.0.0",
            "169.253.255.255",
            "169.255.0.0",
            "172.15.255.255",
            "172.32.0.0",
            "192.0.1.0",
            "192.167.255.255",
            "192.169.0.0",
            "198.17.255.255",
            "198.20.0.0",
            "223.255.255.255",
            "2001:200::1",
            "2001:4860:4860::8888",
            "2003::1",
            "2606:4700:4700::1111",
            "2a00::1",
            "3ffe::1",
        ] {
            assert_eq!(kind(ip), None, "{ip}");
        }
    }

    proptest! {
        #[test]
        fn an_ipv4_address_wrapped_in_ipv6_is_never_public(bits in any::<u32>()) {
            let ip = Ipv4Addr::from_bits(bits);
            let low = u128::from(bits);
            for wrapped in [
                low,
                (0xffff << 32) | low,
                (0xffff << 48) | low,
                (0x0064_ff9b << 96) | low,
                (0x0064_ff9b_0001 << 80) | low,
                (0x2002 << 112) | (low << 80),
                (0x2001_0000 << 96) | low,
            ] {
                prop_assert!(special(Ipv6Addr::from_bits(wrapped).into()).is_some(), "{}", ip);
            }
        }
    }
}
