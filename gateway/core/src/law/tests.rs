use super::*;
use proptest::prelude::*;

const PROMPT: Prompt = Prompt { tokens: 160, block: 16 };
const MODES: [Mode; 5] = [Mode::Off, Mode::Hard, Mode::Soft, Mode::Adaptive, Mode::AdaptiveSoft];

fn fleet(overlaps: &[u64], loads: &[u64], capacities: &[u64]) -> Vec<Candidate> {
    let one = |((endpoint, &overlap), (&load, &capacity))| Candidate {
        endpoint,
        overlap,
        load,
        capacity,
        cap: None,
    };
    overlaps.iter().enumerate().zip(loads.iter().zip(capacities)).map(one).collect()
}

/// The same by elimination: each step keeps whoever is best by one criterion.
mod oracle {
    use super::*;

    fn keep(from: &mut Vec<usize>, mut score: impl FnMut(usize) -> u64) {
        let best = from.iter().map(|at| score(*at)).max();
        from.retain(|at| Some(score(*at)) == best);
    }

    /// The least whole number of 1 or more that is no less than `pct` percent of the share.
    fn cap(pct: u64, all: &[Candidate], at: usize) -> u64 {
        let load: u64 = all.iter().map(|c| c.load).sum();
        let capacity: u64 = all.iter().map(|c| c.capacity.max(1)).sum();
        (1..).find(|cap| cap * 100 * capacity >= pct * load * all[at].capacity.max(1)).unwrap()
    }

    fn cost(price: u64, all: &[Candidate], at: usize) -> u64 {
        let mean = all.iter().map(|c| c.capacity.max(1)).sum::<u64>() as f64 / all.len() as f64;
        let relative = all[at].capacity.max(1) as f64 / mean;
        let uncached = (PROMPT.tokens.saturating_sub(all[at].overlap)) / PROMPT.block;
        // far from where floating point is in doubt: see the ranges of the property
        uncached * 1000 + (price as f64 * all[at].load as f64 / relative + 1e-6).floor() as u64
    }

    fn bounded(pct: u64, relief: bool, all: &[Candidate]) -> (usize, bool) {
        let under = |at: usize| u64::from(all[at].load < cap(pct, all, at));
        let mut winner: Vec<usize> = (0..all.len()).filter(|at| all[*at].overlap > 0).collect();
        let holders = winner.clone();
        keep(&mut winner, |at| all[at].overlap);
        keep(&mut winner, under);
        keep(&mut winner, |at| u64::MAX - all[at].load);
        if under(winner[0]) == 1 {
            return (winner[0], false);
        }
        let open = if relief { (0..all.len()).collect() } else { holders.clone() };
        let mut rest: Vec<usize> = open.into_iter().filter(|at| under(*at) == 1).collect();
        let saturated = rest.is_empty();
        if saturated {
            rest = holders;
        }
        if relief || saturated {
            keep(&mut rest, |at| u64::MAX - all[at].load);
        }
        keep(&mut rest, |at| all[at].overlap);
        keep(&mut rest, |at| u64::MAX - all[at].load);
        (rest[0], rest[0] != winner[0])
    }

    fn priced(price: u64, relief: bool, all: &[Candidate]) -> (usize, bool) {
        let mut open: Vec<usize> = (0..all.len()).filter(|at| relief || all[*at].overlap > 0).collect();
        keep(&mut open, |at| u64::MAX - cost(price, all, at));
        keep(&mut open, |at| all[at].overlap);
        keep(&mut open, |at| u64::MAX - all[at].load);
        (open[0], all.iter().any(|c| c.overlap > all[open[0]].overlap))
    }

    pub fn select(law: &Law, all: &[Candidate]) -> Option<(usize, bool)> {
        if all.iter().all(|c| c.overlap == 0) {
            return None;
        }
        let load: u64 = all.iter().map(|c| c.load).sum();
        Some(match law.mode {
            Mode::Off => {
                let most = all.iter().map(|c| c.overlap).max();
                (all.iter().position(|c| Some(c.overlap) == most).unwrap(), false)
            }
            Mode::Hard => bounded(law.mean_load_factor_pct.into(), law.relief, all),
            Mode::Soft => priced(law.load_penalty.into(), law.relief, all),
            Mode::Adaptive => {
                let pct = match load {
                    0..=16 => 175,
                    26.. => 300,
                    _ => 175 + (load - 16) * 125 / 10,
                };
                bounded(pct, law.relief, all)
            }
            Mode::AdaptiveSoft => {
                let price = if load <= 16 { 50_000 } else { (50_000 + (load - 16) * 5_000).min(100_000) };
                priced(price, law.relief, all)
            }
        })
    }
}

fn law() -> impl Strategy<Value = Law> {
    (prop::sample::select(MODES.to_vec()), 100..=1000_u32, 1..=100_000_u32, any::<bool>()).prop_map(
        |(mode, mean_load_factor_pct, load_penalty, relief)| Law {
            mode,
            mean_load_factor_pct,
            load_penalty,
            relief,
        },
    )
}

prop_compose! {
    fn candidates()(
        rows in prop::collection::vec((0..4_u64, 0..12_u64, 0..5_u64), 0..9)
    ) -> Vec<Candidate> {
        let column = |of: fn(&(u64, u64, u64)) -> u64| rows.iter().map(of).collect::<Vec<_>>();
        fleet(&column(|r| r.0 * 48), &column(|r| r.1), &column(|r| r.2))
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    #[test]
    fn agrees_with_the_oracle(law in law(), mut all in candidates()) {
        let expected = oracle::select(&law, &all);
        let selected = select(&law, PROMPT, &mut all);
        prop_assert_eq!(selected.map(|s| (s.at, s.spilled)), expected);
        let Some(Selected { at, limit, .. }) = selected else { return Ok(()) };
        match law.mode {
            Mode::Hard | Mode::Adaptive => {
                let over = all[at].cap.is_some_and(|cap| all[at].load >= cap);
                let limit = limit.unwrap();
                prop_assert!(all[at].load < limit, "it can be taken at all");
                prop_assert_eq!(limit, if over { all[at].load + 1 } else { all[at].cap.unwrap() });
                // the caps add up to at least the load: with relief there is always room somewhere
                prop_assert!(!(over && law.relief && law.mean_load_factor_pct > 100 && law.mode == Mode::Hard));
            }
            _ => prop_assert_eq!((limit, all[at].cap), (None, None)),
        }
        prop_assert!(law.relief || all[at].overlap > 0);
    }

    #[test]
    fn nothing_overflows(
        law in law(),
        rows in prop::collection::vec((any::<u64>(), any::<u64>(), any::<u64>()), 0..6),
        tokens in any::<u64>(),
        block in any::<u64>(),
    ) {
        let mut all: Vec<_> = rows.iter().enumerate().map(|(endpoint, (overlap, load, capacity))| {
            Candidate { endpoint, overlap: *overlap, load: *load, capacity: *capacity, cap: None }
        }).collect();
        let selected = select(&law, Prompt { tokens, block }, &mut all);
        prop_assert_eq!(selected.is_some(), all.iter().any(|c| c.overlap > 0));
        prop_assert!(selected.is_none_or(|s| s.at < all.len()));
    }

    /// Capacities matter by their ratio alone; the order of the candidates does not matter.
    #[test]
    fn neither_unit_nor_order_matters(law in law(), all in candidates(), unit in 1..1000_u64) {
        let mut scaled = all.clone();
        scaled.iter_mut().for_each(|c| c.capacity = c.capacity.max(1) * unit);
        scaled.reverse();
        let of = |mut all: Vec<Candidate>| {
            select(&law, PROMPT, &mut all).map(|s| (all[s.at].endpoint, s.limit, s.spilled))
        };
        prop_assert_eq!(of(all), of(scaled));
    }

    /// With nothing in flight every law takes the most overlap.
    #[test]
    fn without_load_overlap_decides(law in law(), mut all in candidates()) {
        all.iter_mut().for_each(|c| c.load = 0);
        let expected = oracle::select(&Law { mode: Mode::Off, ..law }, &all);
        prop_assert_eq!(select(&law, PROMPT, &mut all).map(|s| (s.at, s.spilled)), expected);
    }

    /// Requests without end, all of one prompt, each taken by the law: nobody carries more than the bound.
    #[test]
    fn a_herd_is_bounded(count in 1..12_usize, requests in 1..400_usize, pct in 101..400_u32) {
        let law = Law { mean_load_factor_pct: pct, ..Law::default() };
        let mut all = fleet(&vec![0; count], &vec![0; count], &vec![1; count]);
        all[0].overlap = 160;
        for taken in 1..=requests {
            let Selected { at, limit, .. } = select(&law, PROMPT, &mut all).unwrap();
            prop_assert!(limit.is_some_and(|limit| all[at].load < limit));
            all[at].load += 1;
            let bound = (u64::from(pct) * taken as u64).div_ceil(100 * count as u64);
            prop_assert!(all.iter().all(|c| c.load <= bound), "{:?}", all);
        }
    }
}

proptest! {
    #[test]
    fn caps_are_the_smallest_that_are_enough(
        all in prop::collection::vec((0u64..500, 1u64..9), 1..20),
        pct in 100u64..1000,
    ) {
        let (load, total) = all.iter().fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
        let fleet = Fleet::of(all.iter().copied());
        for (_, capacity) in all {
            let enough = |cap: u64| cap * 100 * total >= pct * load * capacity;
            let cap = fleet.cap(pct, capacity);
            prop_assert!(enough(cap) && (cap == 1 || !enough(cap - 1)));
        }
    }
}

#[test]
fn caps_of_nobody_and_of_numbers_without_end() {
    assert_eq!(Fleet::default().cap(100, 0), 1);
    assert_eq!(Fleet::of([(u64::MAX, 1)]).cap(1000, u64::MAX), u64::MAX);
    assert_eq!(Fleet::of([(u64::MAX, 1); 3]).cap(1000, 1), u64::MAX);
}

#[test]
fn one_endpoint_and_none() {
    for mode in MODES {
        let law = Law { mode, ..Law::default() };
        assert_eq!(select(&law, PROMPT, &mut []), None);
        let mut one = fleet(&[16], &[0], &[0]);
        for load in [0, 1, 7, 1_000_000] {
            one[0].load = load;
            let selected = select(&law, PROMPT, &mut one).unwrap();
            assert_eq!((selected.at, selected.spilled), (0, false), "{mode:?} {load}");
            assert!(selected.limit.is_none_or(|limit| load < limit), "{mode:?} {load}");
        }
    }
}

/// The numbers in the documentation are those of the code.
#[test]
fn the_documented_numbers_hold() {
    let page = include_str!("../../../../docs/laws.md");
    let rows = page.lines().skip_while(|l| !l.starts_with("| law | relief |")).skip(2);
    let mut checked = 0;
    for row in rows.take_while(|l| l.starts_with('|')) {
        let cells: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
        let [name, relief, overlaps, loads, capacities, numbers, chosen, spill] = cells[..] else {
            panic!("{row}")
        };
        let list = |text: &str| text.split(", ").map(|n| n.parse().unwrap()).collect::<Vec<u64>>();
        let (mode, number) = name.split_once(' ').unwrap_or((name, "1"));
        let law = Law {
            mode: serde_json::from_value(mode.into()).unwrap(),
            mean_load_factor_pct: number.parse().unwrap(),
            load_penalty: number.parse().unwrap(),
            relief: relief == "on",
        };
        let mut all = fleet(&list(overlaps), &list(loads), &list(capacities));
        let selected = select(&law, PROMPT, &mut all).unwrap();
        assert_eq!((selected.at.to_string(), selected.spilled), (chosen.into(), spill == "yes"), "{row}");
        let totals = Fleet::of(all.iter().map(|c| (c.load, c.capacity)));
        let price = if law.mode == Mode::Soft { number.parse().unwrap() } else { totals.load_penalty() };
        let computed = match law.mode {
            Mode::Off => "none".to_owned(),
            Mode::Hard | Mode::Adaptive => {
                format!("caps {}", listed(all.iter().map(|c| c.cap.unwrap().into())))
            }
            Mode::Soft | Mode::AdaptiveSoft => {
                format!("costs {}", listed(all.iter().map(|c| totals.cost(price, PROMPT, c))))
            }
        };
        assert_eq!(computed, numbers, "{row}");
        checked += 1;
    }
    assert_eq!(checked, 15);
}

fn listed(numbers: impl Iterator<Item = u128>) -> String {
    numbers.map(|n| n.to_string()).collect::<Vec<_>>().join(", ")
}
