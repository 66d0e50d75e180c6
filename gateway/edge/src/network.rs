//! Networks of addresses: who is trusted.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

/// A network in CIDR notation, or a single address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Network {
    address: IpAddr,
    bits: u8,
}

impl Network {
    /// Whether the address is in it. An IPv4 address written as IPv6 (`::ffff:a.b.c.d`) counts as IPv4.
    pub fn contains(&self, address: IpAddr) -> bool {
        match (self.address, address.to_canonical()) {
            (IpAddr::V4(own), IpAddr::V4(other)) => {
                let mask = u32::MAX.checked_shl(32 - u32::from(self.bits)).unwrap_or(0);
                own.to_bits() & mask == other.to_bits() & mask
            }
            (IpAddr::V6(own), IpAddr::V6(other)) => {
                let mask = u128::MAX.checked_shl(128 - u32::from(self.bits)).unwrap_or(0);
                own.to_bits() & mask == other.to_bits() & mask
            }
            _ => false,
        }
    }
}

impl FromStr for Network {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let (address, bits) = match text.split_once('/') {
            Some((address, bits)) if bits.bytes().all(|b| b.is_ascii_digit()) => (address, Some(bits)),
            Some(_) => return Err(()),
            None => (text, None),
        };
        let address: IpAddr = address.parse().map_err(|_| ())?;
        let most = if address.is_ipv4() { 32 } else { 128 };
        let bits = bits.map_or(Ok(most), |bits| bits.parse().map_err(|_| ()))?;
        if bits > most { Err(()) } else { Ok(Self { address, bits }) }
    }
}

impl fmt::Display for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.bits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn networks_hold_their_addresses() {
        for (network, inside, outside) in [
            ("10.0.0.0/8", &["10.255.1.2", "::ffff:10.1.1.1"][..], &["11.0.0.0", "::10.0.0.1"][..]),
            ("10.1.2.3/8", &["10.9.9.9"], &["9.255.255.255"]),
            ("127.0.0.1", &["127.0.0.1"], &["127.0.0.2", "::1"]),
            ("0.0.0.0/0", &["255.255.255.255", "0.0.0.0"], &["::1"]),
            ("fd00::/9", &["fd7f::1"], &["fd80::", "10.0.0.1"]),
            ("::1", &["::1"], &["::2", "127.0.0.1"]),
            ("::/0", &["::1", "ffff::"], &["1.2.3.4"]),
        ] {
            let network: Network = network.parse().unwrap();
            assert!(inside.iter().all(|a| network.contains(a.parse().unwrap())), "{network}");
            assert!(!outside.iter().any(|a| network.contains(a.parse().unwrap())), "{network}");
        }
        for text in
            ["", "10.0.0.0/33", "10.0.0/8", "::/129", "10.0.0.0/", "10.0.0.0/+8", "host", "10.0.0.0/8/8"]
        {
            assert!(text.parse::<Network>().is_err(), "{text}");
        }
    }
}
