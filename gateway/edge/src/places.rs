//! How many connections there may be.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex, PoisonError};

use crate::stats::Reason;

/// The places of connections: so many in all, so many for one client.
#[derive(Debug)]
pub struct Places {
    total: usize,
    per_address: usize,
    taken: Mutex<Taken>,
}

#[derive(Debug, Default)]
struct Taken {
    all: usize,
    by_address: HashMap<IpAddr, usize>,
}

/// A place, given back when dropped.
#[derive(Debug)]
pub(crate) struct Place {
    places: Arc<Places>,
    client: IpAddr,
}

impl Places {
    /// So many in all and for one client; 0 is no limit for one client.
    pub fn new(total: usize, per_address: usize) -> Self {
        Self { total, per_address, taken: Mutex::default() }
    }

    pub(crate) fn take(self: &Arc<Self>, peer: IpAddr) -> Result<Place, Reason> {
        let client = client(peer);
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        if taken.all >= self.total {
            return Err(Reason::Total);
        }
        if self.per_address > 0 {
            let own = taken.by_address.entry(client).or_default();
            if *own >= self.per_address {
                return Err(Reason::PerAddress);
            }
            *own += 1;
        }
        taken.all += 1;
        Ok(Place { places: self.clone(), client })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut taken = self.places.taken.lock().unwrap_or_else(PoisonError::into_inner);
        taken.all -= 1;
        if let Some(own) = taken.by_address.get_mut(&self.client) {
            *own -= 1;
            if *own == 0 {
                taken.by_address.remove(&self.client);
            }
        }
    }
}

/// Who counts as one: an IPv4 address, or a network of IPv6, of which one client has as many addresses as it likes.
fn client(peer: IpAddr) -> IpAddr {
    match peer.to_canonical() {
        IpAddr::V6(address) => {
            let [a, b, c, d, ..] = address.segments();
            Ipv6Addr::new(a, b, c, d, 0, 0, 0, 0).into()
        }
        v4 => v4,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn at(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn places_are_given_back() {
        let places = Arc::new(Places::new(3, 2));
        let a = places.take(at("10.0.0.1")).unwrap();
        let b = places.take(at("::ffff:10.0.0.1")).unwrap();
        assert_eq!(places.take(at("10.0.0.1")).unwrap_err(), Reason::PerAddress);
        let c = places.take(at("10.0.0.2")).unwrap();
        assert_eq!(places.take(at("10.0.0.3")).unwrap_err(), Reason::Total);
        drop(a);
        let d = places.take(at("10.0.0.1")).unwrap();
        drop((b, c, d));
        let taken = places.taken.lock().unwrap();
        assert_eq!((taken.all, taken.by_address.len()), (0, 0));
    }

    #[test]
    fn a_network_of_ipv6_is_one_client() {
        let places = Arc::new(Places::new(9, 1));
        let _held = places.take(at("2001:db8:0:1::1")).unwrap();
        assert_eq!(places.take(at("2001:db8:0:1:ffff::9")).unwrap_err(), Reason::PerAddress);
        places.take(at("2001:db8:0:2::1")).unwrap();
    }

    #[test]
    fn without_a_limit_for_one_client_nobody_is_remembered() {
        let places = Arc::new(Places::new(2, 0));
        let _held = (places.take(at("10.0.0.1")).unwrap(), places.take(at("10.0.0.1")).unwrap());
        assert!(places.taken.lock().unwrap().by_address.is_empty());
        assert_eq!(places.take(at("10.0.0.1")).unwrap_err(), Reason::Total);
    }
}
