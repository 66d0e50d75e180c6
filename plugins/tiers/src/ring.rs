//! A ring of hashes: consistent hashing (Karger and others, 1997).

use kvgate_core::{Endpoint, Mask};
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Points on a circle of 64-bit hashes. They follow from the engines' addresses alone: gateways with the same endpoints
/// have the same ring, whatever the order of these, and what is not theirs moves when one comes or goes.
#[derive(Debug)]
pub struct Ring {
    /// Ascending, each with the position of its endpoint.
    points: Vec<(u64, u32)>,
}

impl Ring {
    /// A ring on which endpoint `i` has `points[i]` points, one at least.
    pub fn new(endpoints: &[Endpoint], points: impl Fn(&Endpoint) -> u64) -> Self {
        let of = |(at, endpoint): (u32, &Endpoint)| {
            let address = endpoint.engine.address().to_owned();
            let count = points(endpoint).max(1);
            (0..count).map(move |nth| (xxh3_64_with_seed(address.as_bytes(), nth), at))
        };
        let mut points: Vec<_> = (0..).zip(endpoints).flat_map(of).collect();
        points.sort_unstable();
        Self { points }
    }

    /// The eligible endpoints by position, each once, in the order in which they are met from `hash` on.
    pub fn walk<'a>(&'a self, hash: u64, eligible: &'a Mask) -> impl Iterator<Item = usize> + 'a {
        let start = self.points.partition_point(|(point, _)| *point < hash);
        let (before, after) = self.points.split_at(start);
        let (mut met, mut missing) = (Mask::none(), eligible.count());
        let mut points = after.iter().chain(before);
        std::iter::from_fn(move || {
            if missing == 0 {
                return None;
            }
            let new = |at: &usize| eligible.contains(*at) && !met.contains(*at);
            let at = points.by_ref().map(|(_, at)| *at as usize).find(new)?;
            met.insert(at);
            missing -= 1;
            Some(at)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvgate_core::{Engines, Identity, Role};
    use proptest::prelude::*;
    use proptest::sample::subsequence;

    fn endpoints(numbers: &[u16]) -> Vec<Endpoint> {
        let engines = Engines::default();
        let one = |(index, number): (usize, &u16)| Endpoint {
            engine: engines.get(&Identity { address: format!("10.0.0.1:{number}"), tls: None }),
            role: Role::Any,
            weight: 1,
            index,
        };
        numbers.iter().enumerate().map(one).collect()
    }

    fn keys() -> impl Iterator<Item = u64> {
        (0..500).map(|n: u64| xxh3_64_with_seed(&n.to_le_bytes(), 7))
    }

    /// Who gets each key, by number.
    fn owners(numbers: &[u16]) -> Vec<u16> {
        let ring = Ring::new(&endpoints(numbers), |_| 64);
        let all = Mask::first(numbers.len());
        keys().map(|key| numbers[ring.walk(key, &all).next().unwrap()]).collect()
    }

    fn numbers() -> impl Strategy<Value = Vec<u16>> {
        subsequence((8000..8020).collect::<Vec<u16>>(), 2..12).prop_shuffle()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(60))]

        /// The oracle: each endpoint by its point that is nearest clockwise.
        #[test]
        fn a_walk_meets_each_eligible_endpoint_once_in_order(numbers in numbers(), points in 1u64..40, hash: u64, out in prop::collection::vec(any::<bool>(), 12)) {
            let endpoints = endpoints(&numbers);
            let eligible: Mask = (0..numbers.len()).filter(|at| !out[*at]).collect();
            let ring = Ring::new(&endpoints, |_| points);
            let nearest = |at: &usize| {
                let address = endpoints[*at].engine.address().to_owned();
                (0..points).map(|n| xxh3_64_with_seed(address.as_bytes(), n).wrapping_sub(hash)).min()
            };
            let mut expected: Vec<_> = eligible.iter().collect();
            expected.sort_by_key(nearest);
            prop_assert_eq!(ring.walk(hash, &eligible).collect::<Vec<_>>(), expected);
        }

        #[test]
        fn one_that_goes_moves_its_own_keys_only_and_the_order_moves_none(numbers in numbers(), gone in any::<prop::sample::Index>()) {
            let before = owners(&numbers);
            let mut rest = numbers.clone();
            let gone = rest.remove(gone.index(numbers.len()));
            rest.reverse();
            for (before, after) in before.iter().zip(owners(&rest)) {
                prop_assert!(*before == after || *before == gone);
                prop_assert!(after != gone);
            }
        }

        #[test]
        fn more_points_take_keys_and_give_none(numbers in numbers(), few in 1u64..20, more in 0u64..60) {
            let (endpoints, all) = (endpoints(&numbers), Mask::first(numbers.len()));
            let ring = |first: u64| Ring::new(&endpoints, |e| if e.index == 0 { first } else { 20 });
            let (before, after) = (ring(few), ring(few + more));
            for key in keys() {
                let (before, after) = (before.walk(key, &all).next(), after.walk(key, &all).next());
                prop_assert!(before == after || after == Some(0));
            }
        }
    }

    /// The part of the circle that each endpoint has.
    fn parts(ring: &Ring, count: usize) -> Vec<f64> {
        let mut parts = vec![0.0; count];
        let mut last = ring.points.last().unwrap().0;
        for (point, at) in &ring.points {
            parts[*at as usize] += point.wrapping_sub(last) as f64 / 2f64.powi(64);
            last = *point;
        }
        parts
    }

    #[test]
    fn the_parts_of_the_ring_are_about_equal() {
        for count in [2, 4, 8, 32] {
            let numbers: Vec<u16> = (8000..).take(count).collect();
            let parts = parts(&Ring::new(&endpoints(&numbers), |_| 256), count);
            assert!((parts.iter().sum::<f64>() - 1.0).abs() < 1e-9);
            let all = parts.iter().map(|part| part * count as f64);
            assert!(all.clone().all(|part| (0.75..1.25).contains(&part)), "{:?}", all.collect::<Vec<_>>());
        }
        let weighted = parts(&Ring::new(&endpoints(&[1, 2, 3]), |e| [256, 128, 64][e.index]), 3);
        for (part, weight) in weighted.iter().zip([4.0, 2.0, 1.0]) {
            assert!((part / (weight / 7.0) - 1.0).abs() < 0.25, "{weighted:?}");
        }
    }

    #[test]
    fn a_ring_of_nobody() {
        assert_eq!(Ring::new(&[], |_| 256).walk(1, &Mask::none()).next(), None);
    }
}
