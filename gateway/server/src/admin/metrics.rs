//! `/metrics`: everything, read at this moment.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use kvgate_core::{BreakerState, Engine};
use kvgate_edge::Reason;
use kvgate_engines::metrics::Reading;
use kvgate_feed::plane::FeedStatus;
use kvgate_prompt::State as ModelState;

use crate::exposition::{Exposition, Labels};
use crate::plan::Rule;
use crate::telemetry::Status;
use crate::world::World;

pub async fn page(State(world): State<Arc<World>>) -> Response {
    let page = render(&world);
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], page).into_response()
}

/// The page.
pub fn render(world: &World) -> String {
    let mut page = Exposition::default();
    page.registry(&world.registry);
    process(&mut page, world);
    for rule in &world.plan.load().rules {
        endpoints(&mut page, world, rule);
        rule.counts.histograms().for_each(|histogram| page.collect(histogram));
    }
    for (service, alarm, detail) in world.alarms.all() {
        let help = "1 while an alarm of a service is on; /readyz says what it means.";
        page.gauge("kvgate_alarm", help, &[("service", &service), ("alarm", alarm)], on(detail.is_some()));
    }
    page.render()
}

fn on(yes: bool) -> f64 {
    if yes { 1.0 } else { 0.0 }
}

fn process(page: &mut Exposition, world: &World) {
    let reloads = &world.reloads;
    let good = reloads.problem().is_none();
    page.gauge("kvgate_build_info", "The version.", &[("version", env!("CARGO_PKG_VERSION"))], 1.0);
    page.gauge(
        "kvgate_config_last_reload_successful",
        "1 if the configuration on disk is the one in force, 0 while it was refused.",
        &[],
        on(good),
    );
    page.gauge(
        "kvgate_config_last_reload_success_timestamp_seconds",
        "When the configuration in force was read.",
        &[],
        reloads.last_good.load(Relaxed) as f64,
    );
    for (result, count) in [("good", &reloads.good), ("refused", &reloads.bad)] {
        let help = "Readings of the configuration, the first included.";
        page.counter("kvgate_config_reloads_total", help, &[("result", result)], count.load(Relaxed));
    }
    let leases: u64 = world.engines.all().iter().map(|e| e.in_flight()).sum();
    page.gauge("kvgate_leases_open", "Requests in flight on engines.", &[], leases as f64);
    page.gauge(
        "kvgate_body_buffer_free_bytes",
        "Memory for request bodies that is not in use.",
        &[],
        world.buffers.free() as f64,
    );
    let budget = world.budget.left(Instant::now(), world.plan.load().gateway.retry_budget);
    let help = "Requests that may be asked again now, of all services: what is left of the retry budget.";
    page.gauge("kvgate_retry_budget_remaining", help, &[], budget as f64);
    page.gauge(
        "kvgate_requests_open",
        "Requests under way, from their head to the end of their answer.",
        &[],
        world.life.requests() as f64,
    );
    connections(page, world);
    certificates(page, world);
    inventory(page, world);
    models(page, world);
}

fn connections(page: &mut Exposition, world: &World) {
    for listener in world.edge.listeners() {
        let labels = [("listener", listener.name())];
        let help = "Connections of clients that are open.";
        page.gauge("kvgate_connections_open", help, &labels, listener.open() as f64);
        let help = "Connections of clients that were accepted, those included that were refused at once.";
        page.counter("kvgate_connections_accepted_total", help, &labels, listener.accepted());
        let help = "Times that the system had no connection to give, as without free file descriptors.";
        page.counter("kvgate_accept_failures_total", help, &labels, listener.failed());
        for reason in Reason::ALL {
            let labels = [("listener", listener.name()), ("reason", reason.name())];
            let help = "Connections of clients that were refused or cut, by reason.";
            page.counter("kvgate_connections_refused_total", help, &labels, listener.refused(reason));
        }
    }
}

fn certificates(page: &mut Exposition, world: &World) {
    for (listener, tls) in &world.tls {
        for certificate in tls.load().certificates() {
            let file = certificate.file.display().to_string();
            let labels = [("listener", listener.as_str()), ("certificate", file.as_str())];
            let help = "When the certificate in force, or one of its chain, expires, in seconds since 1970.";
            page.gauge(
                "kvgate_certificate_expires_timestamp_seconds",
                help,
                &labels,
                certificate.expires as f64,
            );
        }
    }
}

fn inventory(page: &mut Exposition, world: &World) {
    let stats = world.plane.stats();
    for (name, help, value) in [
        ("kvgate_inventory_blocks", "Distinct blocks held by any cache.", stats.blocks),
        ("kvgate_inventory_pairs", "Blocks held, counted once for each cache that holds them.", stats.pairs),
        (
            "kvgate_inventory_orphans",
            "Blocks whose parent is unknown: they earn no credit yet.",
            stats.orphans,
        ),
    ] {
        page.gauge(name, help, &[], value as f64);
    }
    page.counter(
        "loxilb_kv_inv_cap_evictions_total",
        "Caches cleared because they outgrew their bound.",
        &[],
        stats.overflows,
    );
}

fn models(page: &mut Exposition, world: &World) {
    for (model, state) in world.prompts.tokenizers().held() {
        let labels = [("model", model.as_str())];
        let ready = matches!(state, ModelState::Ready(_));
        page.gauge("kvgate_tokenizer_ready", "1 if the model's tokenizer is loaded.", &labels, on(ready));
        let ModelState::Ready(model) = state else { continue };
        let stats = model.cache_stats();
        for (name, help, value) in [
            (
                "kvgate_tokenizer_cache_hits_total",
                "Segments found in the cache of tokenised text.",
                stats.hits,
            ),
            ("kvgate_tokenizer_cache_misses_total", "Segments tokenised anew.", stats.misses),
        ] {
            page.counter(name, help, &labels, value);
        }
        let help = "Memory of the cache of tokenised text.";
        page.gauge("kvgate_tokenizer_cache_bytes", help, &labels, stats.bytes as f64);
    }
}

fn endpoints(page: &mut Exposition, world: &World, rule: &Rule) {
    let service = rule.config.name.as_str();
    for endpoint in &rule.endpoints {
        let (index, address) = (endpoint.index.to_string(), endpoint.engine.address());
        let labels = [("service", service), ("ep_idx", index.as_str()), ("ep", address)];
        let in_flight = endpoint.engine.in_flight() as f64;
        page.gauge("loxilb_pd_ep_info", "1 for each endpoint: which number is which address.", &labels, 1.0);
        page.gauge("kvgate_endpoint_in_flight", "Requests in flight, of all services.", &labels, in_flight);
        page.gauge(
            "kvgate_endpoint_available",
            "1 if the endpoint takes new requests.",
            &labels,
            on(endpoint.engine.takes_new(Instant::now())),
        );
        health(page, &labels, &endpoint.engine);
        if let Some(probe) = world.probe(endpoint.engine.id()) {
            let help = "Times that the engine was asked whether it is well.";
            page.counter("kvgate_probes_total", help, &labels, probe.asked());
            let help = "Times that the engine was not well when it was asked.";
            page.counter("kvgate_probe_failures_total", help, &labels, probe.failed());
        }
        if rule.kv.is_some()
            && let Some(status) = world.feed(endpoint.engine.id())
        {
            let blocks = status.blocks.get() as f64;
            let by_index = [("service", service), ("ep_idx", index.as_str())];
            page.gauge("loxilb_pd_kv_blocks", "Blocks the endpoint holds.", &by_index, blocks);
            feed(page, service, address, &status);
        }
        if rule.config.asks_engines()
            && let Some(status) = world.scraper(endpoint.engine.id())
        {
            telemetry(page, &labels, &endpoint.engine, &status);
        }
    }
}

fn health(page: &mut Exposition, labels: Labels<'_>, engine: &Engine) {
    let now = Instant::now();
    let breaker = match engine.breaker(now) {
        BreakerState::Closed => 0.0,
        BreakerState::Open => 1.0,
        BreakerState::HalfOpen => 2.0,
    };
    let cooling = engine.cooling(now).map(|(until, _)| until.saturating_duration_since(now));
    let help = "0 while probes find the engine down, else 1.";
    page.gauge("kvgate_endpoint_healthy", help, labels, on(engine.is_healthy()));
    let help = "The engine's circuit breaker: 0 closed, 1 open, 2 half open.";
    page.gauge("kvgate_endpoint_breaker", help, labels, breaker);
    let help = "For how long the engine is left alone because it asked for it by Retry-After.";
    page.gauge("kvgate_endpoint_cooling_seconds", help, labels, cooling.unwrap_or_default().as_secs_f64());
    let help = "Times that the engine's circuit breaker opened or closed, of all services.";
    page.counter("loxilb_pd_cb_flips_total", help, labels, engine.breaker_flips());
}

fn telemetry(page: &mut Exposition, labels: Labels<'_>, engine: &Engine, status: &Status) {
    let now = Instant::now();
    let fresh = engine.telemetry(now);
    let help = "1 while what the engine told of itself may be believed: only then it counts.";
    page.gauge("kvgate_telemetry_fresh", help, labels, on(fresh.is_some()));
    let help = "How long ago the engine last told of itself; while it never did, how long it has been asked.";
    page.gauge("kvgate_telemetry_age_seconds", help, labels, status.age(now).as_secs_f64());
    for (family, state) in status.families() {
        let help = "1, with how it stands with what is looked for on the engine's page: known, cold (not there before \
                    the engine's first request), missing (not there after it).";
        let of = [("family", family.name()), ("state", state.name())];
        let labels: Vec<_> = labels.iter().copied().chain(of).collect();
        page.gauge("kvgate_telemetry_family", help, &labels, 1.0);
    }
    // what is not known has no series: nobody shall add it up as nothing
    if let Some(told) = status.reading().filter(|_| fresh.is_some()) {
        reading(page, labels, &told);
    }
    for (reason, n) in status.errors() {
        let labels: Vec<_> = labels.iter().copied().chain([("reason", reason)]).collect();
        let help = "Times that an engine was asked for its metrics page in vain.";
        page.counter("kvgate_telemetry_errors_total", help, &labels, n);
    }
}

fn reading(page: &mut Exposition, labels: Labels<'_>, told: &Reading) {
    for (name, help, value) in [
        ("kvgate_engine_kv_blocks", "KV blocks the engine can hold.", told.blocks),
        ("kvgate_engine_running", "Requests the engine runs, by its own count.", told.running),
        ("kvgate_engine_waiting", "Requests that wait in the engine, by its own count.", told.waiting),
    ] {
        if let Some(value) = value {
            page.gauge(name, help, labels, value as f64);
        }
    }
    if let Some(share) = told.usage {
        let help = "Share of the engine's KV cache in use, 0 to 1; of several ranks, the fullest.";
        page.gauge("kvgate_engine_kv_cache_usage_ratio", help, labels, share);
    }
    for (name, help, value) in [
        (
            "kvgate_engine_prompt_tokens_total",
            "Tokens of prompts since the engine's start, by its own count.",
            told.prompt_tokens,
        ),
        (
            "kvgate_engine_generation_tokens_total",
            "Tokens generated since the engine's start, by its own count.",
            told.generation_tokens,
        ),
    ] {
        if let Some(value) = value {
            page.counter(name, help, labels, value);
        }
    }
    if let Some(ttft) = &told.ttft {
        let help =
            "Time to the first token since the engine's start, by its own clock and in its own buckets.";
        page.histogram("kvgate_engine_ttft_seconds", help, labels, &ttft.buckets, ttft.sum, ttft.count);
    }
}

fn feed(page: &mut Exposition, service: &str, ep: &str, status: &FeedStatus) {
    let labels = [("service", service), ("ep", ep)];
    let connected = on(status.connected.get());
    page.gauge(
        "loxilb_kv_subscriber_connected",
        "1 if the engine's events are followed.",
        &labels,
        connected,
    );
    let errors = status.receive_errors().map(|(_, n)| n).sum();
    for (name, help, value) in [
        (
            "loxilb_kv_subscriber_reconnect_total",
            "Connections to the engine's events after the first.",
            status.connects_total.get().saturating_sub(1),
        ),
        ("loxilb_kv_subscriber_recv_error_total", "Connections to the engine's events that broke.", errors),
        ("kvgate_feed_batches_total", "Batches of events applied.", status.batches_total.get()),
        ("kvgate_feed_events_total", "Events in batches applied.", status.events_total.get()),
        ("kvgate_feed_gaps_total", "Times that sequence numbers jumped.", status.gaps_total.get()),
        ("kvgate_feed_again_total", "Batches applied again, after a clear.", status.again_total.get()),
        ("kvgate_feed_restarts_total", "Times that the engine had restarted.", status.restarts_total.get()),
        ("kvgate_feed_replays_total", "Replays asked for.", status.replays_total.get()),
        ("kvgate_feed_replays_failed_total", "Replays that failed.", status.replays_failed_total.get()),
        ("kvgate_feed_replayed_total", "Batches applied from a replay.", status.replayed_total.get()),
        (
            "kvgate_feed_dropped_total",
            "Messages dropped because the queue was full.",
            status.dropped_total.get(),
        ),
    ] {
        page.counter(name, help, &labels, value);
    }
    let settled = "1 if what is held is the engine's: only then it is credited.";
    page.gauge("kvgate_feed_settled", settled, &labels, on(status.settled.get()));
    for (name, help, value) in [
        ("kvgate_feed_queued", "Messages waiting to be looked at.", status.queued.get()),
        ("kvgate_feed_held", "Batches that wait for a replay.", status.held.get()),
        ("kvgate_feed_orphans", "Blocks of unknown parent.", status.orphans.get()),
        (
            "kvgate_feed_block_size_tokens",
            "Tokens per block; 0 before the first event.",
            status.block_size.get(),
        ),
        (
            "kvgate_feed_last_event_timestamp_ms",
            "When the last message came; 0: never.",
            status.last_event_ms.get(),
        ),
    ] {
        page.gauge(name, help, &labels, value as f64);
    }
    let by = |page: &mut Exposition, name: &str, help: &str, reason: &str, value| {
        page.counter(name, help, &[("service", service), ("ep", ep), ("reason", reason)], value);
    };
    for (reason, n) in status.connect_errors() {
        by(page, "kvgate_feed_connect_errors_total", "Attempts to connect that failed.", reason, n);
    }
    for (reason, n) in status.decode_errors() {
        by(page, "kvgate_feed_bad_messages_total", "Messages that could not be read.", reason, n);
    }
    for (reason, n) in status.lost() {
        by(page, "kvgate_feed_lost_total", "Batches passed over.", reason, n);
    }
    for (reason, n) in status.ignored() {
        by(page, "kvgate_feed_ignored_total", "Batches that came and were not applied.", reason, n);
    }
    for (reason, n) in status.clears() {
        by(page, "kvgate_feed_clears_total", "Times that the mirror was cleared.", reason, n);
    }
    for (reason, n) in status.reasons() {
        by(page, "kvgate_feed_blocks_total", "What became of the blocks in events.", reason.name(), n);
    }
}
