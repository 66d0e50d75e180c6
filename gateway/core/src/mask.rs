//! A set of endpoint positions.

/// A set of positions in a rule's list of endpoints. Grows as needed: a fleet of 300 is ordinary.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Mask(Vec<u64>);

impl Mask {
    /// No position.
    pub fn none() -> Self {
        Self::default()
    }

    /// The positions `0..count`.
    pub fn first(count: usize) -> Self {
        (0..count).collect()
    }

    /// Adds a position.
    pub fn insert(&mut self, at: usize) {
        if self.0.len() <= at / 64 {
            self.0.resize(at / 64 + 1, 0);
        }
        if let Some(word) = self.0.get_mut(at / 64) {
            *word |= 1 << (at % 64);
        }
    }

    /// Takes a position out.
    pub fn remove(&mut self, at: usize) {
        if let Some(word) = self.0.get_mut(at / 64) {
            *word &= !(1 << (at % 64));
        }
    }

    /// Whether the position is in the set.
    pub fn contains(&self, at: usize) -> bool {
        self.0.get(at / 64).is_some_and(|word| word & (1 << (at % 64)) != 0)
    }

    /// Whether the set is empty.
    pub fn is_empty(&self) -> bool {
        self.0.iter().all(|word| *word == 0)
    }

    /// How many positions the set holds.
    pub fn count(&self) -> usize {
        self.0.iter().map(|word| word.count_ones() as usize).sum()
    }

    /// Keeps only what `other` holds too.
    pub fn intersect(&mut self, other: &Mask) {
        for (i, word) in self.0.iter_mut().enumerate() {
            *word &= other.0.get(i).copied().unwrap_or(0);
        }
    }

    /// The positions, ascending.
    pub fn iter(&self) -> impl Iterator<Item = usize> + '_ {
        self.0.iter().enumerate().flat_map(|(i, word)| {
            let mut rest = *word;
            std::iter::from_fn(move || {
                let bit = (rest != 0).then(|| rest.trailing_zeros() as usize)?;
                rest &= rest - 1;
                Some(i * 64 + bit)
            })
        })
    }
}

impl FromIterator<usize> for Mask {
    fn from_iter<I: IntoIterator<Item = usize>>(positions: I) -> Self {
        let mut mask = Self::none();
        positions.into_iter().for_each(|at| mask.insert(at));
        mask
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        #[test]
        fn behaves_as_a_set(ins in prop::collection::vec(0usize..400, 0..60), outs in prop::collection::vec(0usize..400, 0..60), other in prop::collection::btree_set(0usize..400, 0..60)) {
            let mut set: BTreeSet<usize> = ins.iter().copied().collect();
            let mut mask: Mask = ins.into_iter().collect();
            for at in outs { set.remove(&at); mask.remove(at); }
            prop_assert_eq!(mask.iter().collect::<Vec<_>>(), set.iter().copied().collect::<Vec<_>>());
            prop_assert_eq!(mask.count(), set.len());
            prop_assert_eq!(mask.is_empty(), set.is_empty());
            mask.intersect(&other.iter().copied().collect());
            prop_assert_eq!(mask.iter().collect::<BTreeSet<_>>(), &set & &other);
        }
    }
}
