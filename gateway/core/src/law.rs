//! Laws: how overlap and load are traded against each other.

use crate::tier::Candidate;

/// How overlap and load are traded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Law {
    /// Most overlap wins, whatever the load; among equals the first endpoint.
    #[default]
    Off,
}

/// The position in `candidates` of the one to take; `None` when none of them overlaps.
pub fn select(law: Law, candidates: &[Candidate]) -> Option<usize> {
    match law {
        Law::Off => {
            let most = candidates.iter().map(|c| c.overlap).max().filter(|most| *most > 0)?;
            let best = candidates.iter().enumerate().filter(|(_, c)| c.overlap == most);
            best.min_by_key(|(_, c)| c.endpoint).map(|(at, _)| at)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn off_takes_the_first_of_the_most(overlaps in prop::collection::vec(0u64..4, 0..12)) {
            let candidates: Vec<_> = overlaps.iter().enumerate()
                .map(|(endpoint, overlap)| Candidate { endpoint, overlap: *overlap, ..Candidate::default() })
                .collect();
            let mut oracle: Option<usize> = None;
            for (at, overlap) in overlaps.iter().enumerate() {
                if *overlap > 0 && oracle.is_none_or(|o| overlaps[o] < *overlap) {
                    oracle = Some(at);
                }
            }
            prop_assert_eq!(select(Law::Off, &candidates), oracle);
        }
    }
}
