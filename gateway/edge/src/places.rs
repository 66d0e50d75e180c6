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
    /// Who has it, once that is known.
    client: Option<IpAddr>,
    given_back: bool,
}

impl Places {
    /// So many in all and for one client; 0 is no limit for one client.
    pub fn new(total: usize, per_address: usize) -> Self {
        Self { total, per_address, taken: Mutex::default() }
    }

    /// A place for this client; `None` while it is not known who it is.
    pub(crate) fn take(self: &Arc<Self>, client: Option<IpAddr>) -> Result<Place, Reason> {
        {
            let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
            if taken.all >= self.total {
                return Err(Reason::Total);
            }
            taken.all += 1;
        }
        let mut place = Place { places: self.clone(), client: None, given_back: false };
        client.map_or(Ok(()), |client| place.claim(client)).map(|()| place)
    }
}

impl Place {
    /// It is this client's.
    pub fn claim(&mut self, peer: IpAddr) -> Result<(), Reason> {
        if self.places.per_address == 0 || self.client.is_some() {
            return Ok(());
        }
        let client = client(peer);
        let mut taken = self.places.taken.lock().unwrap_or_else(PoisonError::into_inner);
        let own = taken.by_address.entry(client).or_default();
        if *own >= self.places.per_address {
            return Err(Reason::PerAddress);
        }
        *own += 1;
        self.client = Some(client);
        Ok(())
    }

    /// Gives it back now.
    pub fn give_back(&mut self) {
        if std::mem::replace(&mut self.given_back, true) {
            return;
        }
        let mut taken = self.places.taken.lock().unwrap_or_else(PoisonError::into_inner);
        taken.all -= 1;
        let Some(client) = self.client else { return };
        if let Some(own) = taken.by_address.get_mut(&client) {
            *own -= 1;
            if *own == 0 {
                taken.by_address.remove(&client);
            }
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.give_back();
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

    fn at(text: &str) -> Option<IpAddr> {
        Some(text.parse().unwrap())
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
    fn a_place_may_be_claimed_later() {
        let places = Arc::new(Places::new(3, 1));
        let [mut a, mut b, _c] = [0; 3].map(|_| places.take(None).unwrap());
        assert_eq!(places.take(None).unwrap_err(), Reason::Total);
        let client = at("10.0.0.1").unwrap();
        a.claim(client).unwrap();
        assert_eq!(b.claim(client).unwrap_err(), Reason::PerAddress);
        a.give_back();
        b.claim(client).unwrap();
        drop((a, b));
        let taken = places.taken.lock().unwrap();
        assert_eq!((taken.all, taken.by_address.len()), (1, 0));
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
