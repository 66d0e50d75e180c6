use super::*;
use proptest::prelude::*;

const SECOND: Duration = Duration::from_secs(1);

fn policy() -> BreakerPolicy {
    BreakerPolicy {
        failures: 3,
        origin_errors: 3,
        open_for: 30 * SECOND,
        half_open: 1,
        slow_start: Duration::ZERO,
    }
}

fn breaker(policy: BreakerPolicy, now: Instant) -> Breaker {
    let breaker = Breaker::default();
    breaker.set_policy(policy, now);
    breaker
}

/// A request that ends like this.
fn request(breaker: &Breaker, sign: Sign, now: Instant) -> Option<Change> {
    breaker.leave(breaker.enter(now).unwrap(), sign, now)
}

#[test]
fn three_failures_in_a_row_open_it_and_one_success_closes_it() {
    let now = Instant::now();
    let breaker = breaker(policy(), now);
    assert_eq!(request(&breaker, Sign::Broken, now), Some(Change::Failing));
    assert_eq!(request(&breaker, Sign::OriginError, now), None);
    request(&breaker, Sign::Neutral, now);
    assert_eq!(breaker.state(now), BreakerState::Closed);
    request(&breaker, Sign::Success, now);
    request(&breaker, Sign::Broken, now);
    request(&breaker, Sign::OriginError, now);
    assert_eq!(request(&breaker, Sign::Broken, now), Some(Change::Opened), "a mix counts");
    assert_eq!((breaker.state(now), breaker.enter(now)), (BreakerState::Open, None));
    assert_eq!(breaker.failures(), 3);
    let early = now + 30 * SECOND - Duration::from_nanos(1);
    assert!(!breaker.lets_through(early));
    assert_eq!(breaker.returns(early), Some(now + 30 * SECOND));
    let half = now + 30 * SECOND;
    assert_eq!(breaker.state(half), BreakerState::HalfOpen);
    let trial = breaker.enter(half).unwrap();
    assert_eq!((breaker.lets_through(half), breaker.enter(half)), (false, None), "one at a time");
    assert_eq!(breaker.leave(trial, Sign::Neutral, half), None);
    assert_eq!(breaker.state(half), BreakerState::HalfOpen, "a 400 neither opens nor closes");
    assert_eq!(request(&breaker, Sign::OriginError, half), Some(Change::Reopened));
    let half = half + 30 * SECOND;
    assert_eq!(request(&breaker, Sign::Success, half), Some(Change::Closed));
    assert_eq!((breaker.state(half), breaker.flips(), breaker.failures()), (BreakerState::Closed, 3, 0));
}

#[test]
fn looking_changes_nothing() {
    let now = Instant::now();
    let breaker = breaker(BreakerPolicy { open_for: Duration::ZERO, ..policy() }, now);
    for _ in 0..3 {
        request(&breaker, Sign::Broken, now);
    }
    for _ in 0..100 {
        assert!(breaker.lets_through(now));
        assert_eq!(breaker.state(now), BreakerState::HalfOpen);
    }
    assert!(breaker.enter(now).is_some());
}

#[test]
fn what_began_before_it_opened_does_not_close_it() {
    let now = Instant::now();
    let breaker = breaker(policy(), now);
    let (slow, slower) = (breaker.enter(now).unwrap(), breaker.enter(now).unwrap());
    for _ in 0..3 {
        request(&breaker, Sign::Broken, now);
    }
    assert_eq!(breaker.leave(slow, Sign::Success, now), None);
    let half = now + 30 * SECOND;
    let trial = breaker.enter(half).unwrap();
    assert_eq!(breaker.leave(slower, Sign::Broken, half), None);
    assert_eq!(breaker.state(half), BreakerState::HalfOpen);
    assert!(!breaker.lets_through(half), "the trial is still under way");
    assert_eq!(breaker.leave(trial, Sign::Success, half), Some(Change::Closed));
}

#[test]
fn a_long_answer_does_not_keep_others_from_seeing() {
    for (open_for, hold) in [(30 * SECOND, 30 * SECOND), (SECOND, TRIAL)] {
        let now = Instant::now();
        let breaker = breaker(BreakerPolicy { open_for, ..policy() }, now);
        for _ in 0..3 {
            request(&breaker, Sign::Broken, now);
        }
        let half = now + open_for;
        let long = breaker.enter(half).unwrap();
        assert!(!breaker.lets_through(half + hold - Duration::from_nanos(1)));
        let later = half + hold;
        let next = breaker.enter(later).unwrap();
        assert_eq!(breaker.enter(later), None, "one more, not all");
        assert_eq!(breaker.leave(long, Sign::Neutral, later), None);
        assert_eq!(breaker.enter(later), None, "a place that was given back already");
        assert_eq!(breaker.leave(next, Sign::Neutral, later), None);
        // whoever took longest still tells how the engine is
        let long = breaker.enter(later).unwrap();
        assert!(breaker.enter(later + hold).is_some());
        assert_eq!(breaker.leave(long, Sign::Success, later + hold), Some(Change::Closed));
    }
}

#[test]
fn a_pass_is_good_until_it_opens_again() {
    let now = Instant::now();
    let breaker = breaker(policy(), now);
    let before = breaker.enter(now).unwrap();
    assert!(breaker.honours(before));
    for _ in 0..3 {
        request(&breaker, Sign::Broken, now);
    }
    let half = now + 30 * SECOND;
    let trial = breaker.enter(half).unwrap();
    assert_eq!((breaker.honours(before), breaker.honours(trial)), (false, true), "not of this round");
    breaker.set_policy(BreakerPolicy { half_open: 2, ..policy() }, half);
    assert_eq!(request(&breaker, Sign::Broken, half), Some(Change::Reopened));
    assert!(!breaker.honours(trial));
    let half = half + 30 * SECOND;
    assert_eq!(request(&breaker, Sign::Success, half), Some(Change::Closed));
    assert!(breaker.honours(before) && breaker.honours(trial));
}

#[test]
fn errors_of_the_origin_count_only_where_they_are_to() {
    let now = Instant::now();
    let lenient = breaker(BreakerPolicy { origin_errors: 0, ..policy() }, now);
    (0..50).for_each(|_| assert_eq!(request(&lenient, Sign::OriginError, now), None));
    for _ in 0..2 {
        request(&lenient, Sign::Broken, now);
    }
    request(&lenient, Sign::OriginError, now);
    assert_eq!(lenient.state(now), BreakerState::Closed);
    assert_eq!(request(&lenient, Sign::Broken, now), Some(Change::Opened));
    let half = now + 30 * SECOND;
    assert_eq!(request(&lenient, Sign::Neutral, half), None, "its client left: nobody knows more");
    assert_eq!(lenient.state(half), BreakerState::HalfOpen);
    assert!(!lenient.set_policy(BreakerPolicy { failures: 9, ..policy() }, half));
    assert_eq!((lenient.state(half), lenient.flips()), (BreakerState::HalfOpen, 1));
    assert!(lenient.set_policy(BreakerPolicy::OFF, half), "turned off");
    assert_eq!((lenient.state(half), lenient.flips()), (BreakerState::Closed, 2));
    assert!(!lenient.set_policy(BreakerPolicy::OFF, half));
    lenient.set_policy(policy(), half);
    assert_eq!(request(&lenient, Sign::Broken, half), Some(Change::Failing), "the row begins anew");
    assert_eq!((lenient.state(half), lenient.flips()), (BreakerState::Closed, 2));
    let off = breaker(BreakerPolicy::OFF, now);
    for _ in 0..50 {
        request(&off, Sign::Broken, now);
    }
    assert!(off.lets_through(now));
}

/// Where only connections are judged, one that was taken is all that is asked of a trial.
#[test]
fn any_answer_closes_it_where_errors_of_the_origin_do_not_count() {
    for sign in [Sign::Success, Sign::Rejected, Sign::OriginError] {
        let now = Instant::now();
        let breaker = breaker(policy(), now);
        for _ in 0..3 {
            request(&breaker, Sign::OriginError, now);
        }
        breaker.set_policy(BreakerPolicy { origin_errors: 0, ..policy() }, now);
        let half = now + 30 * SECOND;
        assert_eq!(request(&breaker, Sign::Neutral, half), None);
        assert_eq!(request(&breaker, sign, half), Some(Change::Closed), "{sign:?}");
        assert_eq!((breaker.state(half), breaker.failures()), (BreakerState::Closed, 0));
    }
}

#[test]
fn trials_that_are_rejected_give_their_places_back() {
    let now = Instant::now();
    let breaker = breaker(policy(), now);
    for _ in 0..3 {
        request(&breaker, Sign::Broken, now);
    }
    let half = now + 30 * SECOND;
    for _ in 0..50 {
        assert_eq!(request(&breaker, Sign::Rejected, half), None);
        assert!(breaker.lets_through(half) && breaker.state(half) == BreakerState::HalfOpen);
    }
    assert_eq!(request(&breaker, Sign::Success, half), Some(Change::Closed));
    assert_eq!((request(&breaker, Sign::Broken, half), breaker.failures()), (Some(Change::Failing), 1));
    assert_eq!(
        (request(&breaker, Sign::Rejected, half), breaker.failures()),
        (None, 1),
        "nor resets it the row"
    );
}

#[test]
fn an_engine_that_wants_to_be_left_alone_is_not_taken_to_fail() {
    let now = Instant::now();
    let breaker = breaker(policy(), now);
    breaker.cool(now + 5 * SECOND, 429, now);
    breaker.cool(now + 2 * SECOND, 503, now);
    assert_eq!(breaker.cooling(now + 4 * SECOND), Some((now + 5 * SECOND, 429)));
    assert_eq!(breaker.returns(now), Some(now + 5 * SECOND));
    assert_eq!((breaker.cooling(now + 5 * SECOND), breaker.returns(now + 5 * SECOND)), (None, None));
    assert!(breaker.lets_through(now) && breaker.state(now) == BreakerState::Closed);
}

#[test]
fn an_engine_that_is_back_gets_its_share_little_by_little() {
    let now = Instant::now();
    let breaker = breaker(BreakerPolicy { slow_start: 100 * SECOND, ..policy() }, now);
    assert_eq!(breaker.share_pct(now), 100);
    for _ in 0..3 {
        request(&breaker, Sign::Broken, now);
    }
    let half = now + 30 * SECOND;
    request(&breaker, Sign::Success, half);
    let after = |seconds: u32| breaker.share_pct(half + seconds * SECOND);
    assert_eq!([0, 1, 50, 99, 100, 500].map(after), [1, 1, 50, 99, 100, 100]);
}

#[test]
fn of_two_policies_the_stricter_holds() {
    let other =
        BreakerPolicy { failures: 5, origin_errors: 0, open_for: SECOND, half_open: 4, slow_start: SECOND };
    let both = BreakerPolicy { slow_start: SECOND, ..policy() };
    assert_eq!((policy().strictest(other), other.strictest(policy())), (both, both));
    assert_eq!(other.strictest(BreakerPolicy::OFF).failures, 5);
}

#[derive(Clone, Debug)]
enum Step {
    Wait(u64),
    Enter,
    Leave(prop::sample::Index, Sign),
    Policy(BreakerPolicy),
}

fn policies() -> impl Strategy<Value = BreakerPolicy> {
    let numbers = (0u32..4, 0u32..4, 1u32..4, 5u32..20);
    numbers.prop_map(|(failures, origin_errors, half_open, seconds)| BreakerPolicy {
        failures,
        origin_errors,
        half_open,
        open_for: seconds * SECOND,
        ..policy()
    })
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let signs = [
        Sign::Success,
        Sign::Neutral,
        Sign::Rejected,
        Sign::Broken,
        Sign::Broken,
        Sign::OriginError,
        Sign::OriginError,
    ];
    let leave = (any::<prop::sample::Index>(), prop::sample::select(signs.to_vec()));
    let step = prop_oneof![
        1 => (0u64..20).prop_map(Step::Wait),
        4 => Just(Step::Enter),
        4 => leave.prop_map(|(at, sign)| Step::Leave(at, sign)),
        1 => prop_oneof![1 => Just(BreakerPolicy::OFF), 3 => policies()].prop_map(Step::Policy),
    ];
    prop::collection::vec(step, 0..200)
}

/// All that ever happened, read from the start whenever something is asked. It begins with a policy.
struct History(Vec<Event>);

enum Event {
    Entered(u64),
    /// Who entered at this place in the history left.
    Left(usize, Sign, u64),
    Policy(BreakerPolicy),
}

impl History {
    fn policy(&self) -> BreakerPolicy {
        let mut policies =
            self.0.iter().filter_map(|e| if let Event::Policy(policy) = e { Some(*policy) } else { None });
        policies.next_back().unwrap()
    }

    /// Until when it is open, if it is, and the place in the history where that began; and how often it opened or
    /// closed.
    fn open(&self) -> (Option<(u64, usize)>, u64) {
        let (mut open, mut row): (Option<(u64, usize)>, Vec<Sign>) = (None, Vec::new());
        let (mut policy, mut flips) = (BreakerPolicy::OFF, 0);
        for (place, event) in self.0.iter().enumerate() {
            let (entered, sign, at) = match event {
                Event::Entered(_) => continue,
                Event::Policy(new) => {
                    policy = *new;
                    if (policy.failures, policy.origin_errors) == (0, 0) && open.is_some() {
                        (open, row, flips) = (None, Vec::new(), flips + 1);
                    }
                    continue;
                }
                Event::Left(entered, sign, at) => (entered, sign, at),
            };
            let failed = *sign == Sign::Broken || *sign == Sign::OriginError && policy.origin_errors > 0;
            let reached = matches!(sign, Sign::Rejected | Sign::OriginError) && policy.origin_errors == 0;
            let closes = *sign == Sign::Success || reached;
            let opens = Some((at + policy.open_for.as_secs(), place));
            match open {
                Some((_, since)) if *entered < since => {}
                Some(_) if closes => (open, row, flips) = (None, Vec::new(), flips + 1),
                Some(_) if failed => (open, flips) = (opens, flips + 1),
                Some(_) => {}
                None if *sign == Sign::Success => row.clear(),
                None if failed => {
                    row.push(*sign);
                    let used = |sign, most| match most {
                        0 => 0.0,
                        most => row.iter().filter(|s| **s == sign).count() as f64 / f64::from(most),
                    };
                    let used =
                        used(Sign::Broken, policy.failures) + used(Sign::OriginError, policy.origin_errors);
                    if used > 0.999 {
                        (open, flips) = (opens, flips + 1);
                    }
                }
                None => {}
            }
        }
        (open, flips)
    }

    fn lets_through(&self, now: u64) -> bool {
        let (Some((until, since)), policy) = (self.open().0, self.policy()) else { return true };
        let left = |place: usize| self.0.iter().any(|e| matches!(e, Event::Left(at, ..) if *at == place));
        let hold = policy.open_for.max(TRIAL).as_secs();
        let holds = |e: &Event| matches!(e, Event::Entered(at) if now < at + hold);
        let entered = self.0.iter().enumerate().skip(since);
        let trials = entered.filter(|(place, e)| holds(e) && !left(*place)).count();
        now >= until && trials < policy.half_open as usize
    }

    fn honours(&self, entered: usize) -> bool {
        self.open().0.is_none_or(|(_, since)| entered >= since)
    }
}

proptest! {
    #[test]
    fn does_as_the_whole_history_says(policy in policies(), steps in steps()) {
        let start = Instant::now();
        let breaker = breaker(policy, start);
        let (mut history, mut inside, mut now) = (History(vec![Event::Policy(policy)]), Vec::new(), 0);
        for step in steps {
            let at = start + Duration::from_secs(now);
            match step {
                Step::Wait(seconds) => now += seconds,
                Step::Enter => {
                    let pass = breaker.enter(at);
                    prop_assert_eq!(pass.is_some(), history.lets_through(now));
                    if let Some(pass) = pass {
                        inside.push((pass, history.0.len()));
                        history.0.push(Event::Entered(now));
                    }
                }
                Step::Leave(which, sign) if !inside.is_empty() => {
                    let (pass, entered) = inside.swap_remove(which.index(inside.len()));
                    breaker.leave(pass, sign, at);
                    history.0.push(Event::Left(entered, sign, now));
                }
                Step::Leave(..) => {}
                Step::Policy(policy) => {
                    let before = breaker.state(at);
                    let closed = breaker.set_policy(policy, at);
                    history.0.push(Event::Policy(policy));
                    prop_assert_eq!(closed, before != BreakerState::Closed && history.open().0.is_none());
                }
            }
            let at = start + Duration::from_secs(now);
            prop_assert_eq!(breaker.lets_through(at), history.lets_through(now));
            let (open, flips) = history.open();
            let expected = match open {
                None => BreakerState::Closed,
                Some((until, _)) if now < until => BreakerState::Open,
                Some(_) => BreakerState::HalfOpen,
            };
            prop_assert_eq!((breaker.state(at), breaker.flips()), (expected, flips));
            for (pass, entered) in &inside {
                prop_assert_eq!(breaker.honours(*pass), history.honours(*entered));
            }
        }
    }
}
