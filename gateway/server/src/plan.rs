//! A plan: everything built from one reading of the configuration. Immutable, swapped whole.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};

use kvgate_core::{
    Alarm, Alarms, BoxFuture, BreakerPolicy, BuildContext, Endpoint, Engine, EngineId, FactSource, Identity,
    Ladder, Miss, Registry, Role, Rung, Services, StateStore, TierKind,
};
use kvgate_kv::mirror::View;
use kvgate_tiers::kv_exact;
use pingora_core::BError;
use pingora_core::upstreams::peer::HttpPeer;

use crate::address::Address;
use crate::config::{Config, Diagnostic, EndpointConfig, GatewayConfig, RuleConfig};
use crate::counts::RuleCounts;
use crate::facts::RulePrompts;
use crate::transport::Transport;
use crate::world::World;

/// The rules in force and what they were made of.
pub struct Plan {
    /// `gateway.toml`.
    pub gateway: GatewayConfig,
    /// The rules, the most specific first.
    pub rules: Vec<Arc<Rule>>,
    /// Tasks that tiers asked for, by rule and name, until they are started.
    pub tasks: Mutex<Vec<(String, BoxFuture<'static, ()>)>>,
}

/// A service.
pub struct Rule {
    /// What it was built from.
    pub config: RuleConfig,
    /// Its endpoints, in the order of the file.
    pub endpoints: Vec<Endpoint>,
    /// Their addresses, in the same order.
    addresses: Vec<Address>,
    /// How they are spoken to.
    pub transport: Arc<Transport>,
    /// Chooses among them; where the rule is a pair, among those for prefill.
    ladder: Ladder,
    /// What a pair has more.
    pair: Option<Pair>,
    /// Whether `kv-exact` is a tier of it, and which view of the blocks it looks at.
    pub kv: Option<View>,
    /// Where the facts about its requests come from.
    pub facts: Arc<dyn FactSource>,
    /// What it counts.
    pub counts: RuleCounts,
    /// On while requests flow and no events come.
    pub no_events: Option<Arc<Alarm>>,
    /// On while the capacity of an engine is not known.
    pub capacity_unknown: Option<Arc<Alarm>>,
    /// The numbers of its endpoints, shared with the rule of the same name in the plans before and after.
    numbers: Arc<Numbers>,
}

/// What serves a request in two legs.
pub struct Pair {
    /// Chooses among the endpoints for decode.
    decode: Ladder,
    /// Chooses among the endpoints for any part, when one part finds none.
    rescue: Ladder,
}

/// `ep_idx` by engine: kept over reloads for endpoints that stay; new ones append. While a rule of the name is in
/// force no number is given to a second engine.
#[derive(Default)]
struct Numbers(Mutex<InForce>);

/// The numbers of the plan in force.
#[derive(Default)]
struct InForce {
    known: BTreeMap<(String, Option<String>), usize>,
    /// Above every number that was ever in force.
    next: usize,
}

impl Numbers {
    fn key(identity: &Identity) -> (String, Option<String>) {
        (identity.address.clone(), identity.tls.clone())
    }

    /// The numbers that these endpoints would have; nothing changes by asking.
    fn assign(&self, identities: &[Identity]) -> Vec<usize> {
        let in_force = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut new = in_force.next..;
        let number = |i| in_force.known.get(&Self::key(i)).copied().or_else(|| new.next());
        identities.iter().filter_map(number).collect()
    }

    /// These endpoints are in force with these numbers, and no others.
    fn commit<'a>(&self, endpoints: impl Iterator<Item = (&'a Identity, usize)>) {
        let mut in_force = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        in_force.known = endpoints.map(|(identity, number)| (Self::key(identity), number)).collect();
        let above = in_force.known.values().max().map_or(0, |n| n + 1);
        in_force.next = in_force.next.max(above);
    }
}

impl Plan {
    /// A plan without rules.
    pub fn empty(gateway: GatewayConfig) -> Self {
        Self { gateway, rules: Vec::new(), tasks: Mutex::default() }
    }

    /// Builds all of it.
    ///
    /// # Errors
    /// Every rule that cannot be built, with the place of the key at fault.
    pub fn build(config: Config, kinds: &[TierKind], world: &World) -> Result<Self, Vec<Diagnostic>> {
        let (mut rules, mut tasks, mut problems) = (Vec::new(), Vec::new(), Vec::new());
        for rule in config.rules {
            match Rule::build(rule, kinds, world, &mut tasks) {
                Ok(rule) => rules.push(Arc::new(rule)),
                Err(mut found) => problems.append(&mut found),
            }
        }
        if !problems.is_empty() {
            return Err(problems);
        }
        rules.sort_by_key(|rule| std::cmp::Reverse(rule.config.matches.specificity()));
        Ok(Self { gateway: config.gateway, rules, tasks: Mutex::new(tasks) })
    }

    /// Has the breakers of its engines go by its rules: of several that name an engine, by the strictest.
    pub fn set_breakers(&self) {
        let mut policies: BTreeMap<EngineId, (&Engine, BreakerPolicy)> = BTreeMap::new();
        for rule in &self.rules {
            let policy = rule.config.breaker_policy();
            for endpoint in &rule.endpoints {
                let engine = &*endpoint.engine;
                let (_, strictest) = policies.entry(engine.id()).or_insert((engine, policy));
                *strictest = strictest.strictest(policy);
            }
        }
        for (engine, policy) in policies.values() {
            if engine.set_breaker_policy(*policy) {
                tracing::warn!(
                    engine = engine.address(),
                    "breaker closed: by the rules nothing opens it any more"
                );
            }
        }
    }

    /// The rules that a request with this head may belong to, the most specific first.
    pub fn by_head<'a>(
        &'a self,
        listener: &'a str,
        host: Option<&'a str>,
        path: &'a str,
    ) -> impl Iterator<Item = &'a Arc<Rule>> {
        self.rules.iter().filter(move |rule| rule.config.matches.head(listener, host, path))
    }
}

impl Rule {
    fn build(
        config: RuleConfig,
        kinds: &[TierKind],
        world: &World,
        tasks: &mut Vec<(String, BoxFuture<'static, ()>)>,
    ) -> Result<Self, Vec<Diagnostic>> {
        let transport = Transport::load(&config.tls).map_err(|found| {
            let error = |(key, problem): (&str, _)| config.error(&format!("tls.{key}"), format!("{problem}"));
            found.into_iter().map(error).collect::<Vec<_>>()
        })?;
        let identities: Vec<_> = config.endpoints.iter().map(EndpointConfig::identity).collect();
        let numbers = world.store.get(&format!("{}/endpoints", config.name), "", Numbers::default);
        let indices = numbers.assign(&identities);
        let numbered = config.endpoints.iter().zip(indices);
        let endpoints: Vec<_> = numbered.map(|(e, index)| e.endpoint(&world.engines, index)).collect();
        let ground = world.ground();
        let mut build = |tiers: &[_]| ladder(&config, tiers, &endpoints, kinds, &ground, tasks);
        let ladder = build(&config.tiers)?;
        let pair = match &config.pair {
            Some(pair) => Some(Pair { decode: build(&pair.tiers)?, rescue: build(&[])? }),
            None => None,
        };
        let tier = config.tier.get(kv_exact::KIND.name).filter(|_| ladder.has(kv_exact::KIND.name));
        let kv = tier.map(kv_exact::follows);
        let facts = RulePrompts::new(world.prompts.clone(), &config, tier);
        Ok(Self {
            pair,
            transport: Arc::new(transport),
            addresses: config.endpoints.iter().map(|e| Address::new(&e.address)).collect(),
            ladder,
            facts: Arc::new(facts),
            counts: RuleCounts::new(&config, &endpoints, world),
            no_events: kv.map(|_| world.alarms.get(&config.name, "kv_no_events")),
            capacity_unknown: (config.asks_engines()
                && config.endpoints.iter().any(|e| config.weighs_capacity(e.role)))
            .then(|| world.alarms.get(&config.name, "capacity_unknown")),
            kv,
            endpoints,
            config,
            numbers,
        })
    }

    /// The peer to connect to for the endpoint at this position; `None` if its name cannot be resolved.
    pub async fn peer(&self, position: usize) -> Option<HttpPeer> {
        let (address, endpoint) = (self.addresses.get(position)?, self.endpoints.get(position)?);
        let tls = endpoint.engine.identity().tls.as_deref();
        address.peer(tls, &self.transport, self.config.timeouts.connect).await
    }

    /// The endpoint at this position took no connection at this address.
    pub fn unreachable(&self, position: usize, socket: SocketAddr) {
        if let Some(address) = self.addresses.get(position) {
            address.unreachable(socket);
        }
    }

    /// TLS could not be agreed on with the endpoint at this position.
    pub fn distrusted(&self, position: usize, error: &BError) {
        if let Some(address) = self.addresses.get(position) {
            address.distrusted(error);
        }
    }

    /// Keeps the numbers of its endpoints over the next reload: called once the plan is in force.
    pub fn commit_numbers(&self) {
        self.numbers.commit(self.endpoints.iter().map(|e| (e.engine.identity(), e.index)));
    }

    /// The part of a request that is not split: all of it in a pool; in a pair decode does all of it.
    pub fn role(&self) -> Role {
        if self.pair.is_some() { Role::Decode } else { Role::Any }
    }

    /// Who chooses for this part.
    pub fn ladder(&self, role: Role) -> &Ladder {
        match (&self.pair, role) {
            (Some(pair), Role::Decode) => &pair.decode,
            (Some(pair), Role::Any) => &pair.rescue,
            _ => &self.ladder,
        }
    }
}

/// What tiers are built on.
pub struct Ground<'a> {
    /// What they keep over reloads.
    pub store: &'a StateStore,
    /// Their counters.
    pub registry: &'a Registry,
    /// Their alarms.
    pub alarms: &'a Alarms,
    /// What the gateway offers them.
    pub services: &'a Services,
}

/// Builds the ladder of these tiers; what they want to run beside requests is added to `tasks`.
///
/// # Errors
/// Every tier that cannot be built, with the place of the key at fault.
pub fn ladder(
    config: &RuleConfig,
    tiers: &[&'static str],
    endpoints: &[Endpoint],
    kinds: &[TierKind],
    ground: &Ground<'_>,
    tasks: &mut Vec<(String, BoxFuture<'static, ()>)>,
) -> Result<Ladder, Vec<Diagnostic>> {
    let (mut rungs, mut problems) = (Vec::new(), Vec::new());
    // named or not, it ends every ladder: here it is counted like the others
    let last = (!tiers.contains(&"min-load")).then_some("min-load");
    for name in tiers.iter().copied().chain(last) {
        let Some(kind) = kinds.iter().find(|kind| kind.name == name) else { continue };
        let mut context = BuildContext {
            rule: &config.name,
            endpoints,
            store: ground.store,
            registry: ground.registry,
            alarms: ground.alarms,
            services: ground.services,
            tasks: Vec::new(),
        };
        let keys = config.tier.get(kind.name).cloned().unwrap_or_default();
        match (kind.build)(&keys, &mut context) {
            Ok(tier) => rungs.push(rung(&config.name, kind, tier, ground.registry)),
            Err(e) => {
                let key = [format!("tier.{name}"), e.key].join(".");
                problems.push(config.error(key.trim_end_matches('.'), e.message));
            }
        }
        let named = |(task, future)| (format!("{}/{name}/{task}", config.name), future);
        tasks.extend(context.tasks.into_iter().map(named));
    }
    if problems.is_empty() { Ok(Ladder::new(rungs, config.timeouts.prepare)) } else { Err(problems) }
}

fn rung(rule: &str, kind: &TierKind, tier: Arc<dyn kvgate_core::Tier>, registry: &Registry) -> Rung {
    let labels = |reason| [("service", rule), ("tier", kind.name), ("reason", reason)];
    let reasons = kind.misses.iter().map(|m| m.reason).chain([Miss::DEADLINE.0, "not_eligible"]);
    let miss = |reason: &'static str| {
        let help = "Requests that a tier passed on to the next, by reason.";
        (reason, registry.counter("kvgate_tier_misses_total", help, &labels(reason)))
    };
    let help = "Choices that a tier made.";
    let picks = registry.counter("kvgate_tier_picks_total", help, &[("service", rule), ("tier", kind.name)]);
    Rung { name: kind.name, tier, misses: reasons.map(miss).collect(), picks }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_stay_and_new_ones_append() {
        let of = |names: &[&str]| -> Vec<Identity> {
            names.iter().map(|a| Identity { address: (*a).into(), tls: None }).collect()
        };
        let numbers = Numbers::default();
        let put_in_force = |names: &[&str]| {
            let (identities, assigned) = (of(names), numbers.assign(&of(names)));
            numbers.commit(identities.iter().zip(assigned.iter().copied()));
            assigned
        };
        assert_eq!(put_in_force(&["a", "b", "c"]), [0, 1, 2]);
        assert_eq!(put_in_force(&["d", "c", "a"]), [3, 2, 0]);
        assert_eq!(put_in_force(&["b", "d"]), [4, 3]);
        assert_eq!(put_in_force(&["e", "d"]), [5, 3], "the highest is gone, and its number with it");
        assert_eq!(put_in_force(&["d"]), [3]);
        assert_eq!(put_in_force(&["f", "d"]), [6, 3]);
        assert_eq!(numbers.assign(&of(&["x", "y"])), [7, 8], "a plan that is refused");
        assert_eq!(put_in_force(&["d", "z"]), [3, 7]);
    }
}
