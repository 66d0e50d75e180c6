//! A request from its head to its decision record.

use std::borrow::Cow;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Instant;

use async_trait::async_trait;
use bytes::Bytes;
use http::uri::Authority;
use http::{HeaderName, header};
use kvgate_core::{Cause, Outcome, Phase, Refused, Request, Role};
use kvgate_prompt::Fields;
use pingora_core::protocols::http::ServerSession;
use pingora_core::upstreams::peer::HttpPeer;
use pingora_core::{Error, ErrorSource, ErrorType, Result};
use pingora_http::{RequestHeader, ResponseHeader};
use pingora_proxy::{FailToProxy, ProxyHttp, Session};

use crate::attempts::Attempts;
use crate::config::ListenerConfig;
use crate::facts::beside;
use crate::forwarded::Origin;
use crate::health::Absence;
use crate::legs::Exchange;
use crate::life::{Entered, Stage};
use crate::plan::Rule;
use crate::relay::{self, Answer, Body, BodyLimits, Code, Failure, Fault, answer, codes};
use crate::told::{shown, unique};
use crate::world::{CLIENT_GONE, World};

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
const MODEL: &str = "x-model";
/// What ids hold that tell engines where a prompt's blocks are: not for clients to say.
const PAIRED: &str = "___decode_addr_";

/// The proxy's logic: one for all listeners.
pub struct Proxy {
    world: Arc<World>,
}

/// What a request carries from hook to hook, where pingora's own path serves it.
#[derive(Default)]
pub struct Context {
    stock: Option<Stock>,
    entered: Option<Entered>,
}

/// A request whose body we do not look into: an upgrade.
struct Stock {
    attempts: Attempts,
    /// Why nobody was chosen.
    refused: Option<Refused>,
    /// Somebody was, and took no connection.
    unreached: bool,
    /// What the engine is told of whose it is.
    tells: Option<Origin>,
}

impl Stock {
    /// Why there is no answer.
    fn fault(&self, error: &Error) -> Answer<'_> {
        let ours = |code: Code| Answer::new(code, code.doc);
        match &self.refused {
            Some(Refused::NoEndpoint) if self.unreached => ours(codes::ENGINE_UNREACHABLE),
            Some(refused) => refusal(refused, self.attempts.rule()),
            None if timed_out(error) => ours(codes::ENGINE_TIMEOUT),
            None => ours(codes::ENGINE_ERROR),
        }
    }
}

fn timed_out(error: &Error) -> bool {
    matches!(error.etype(), ErrorType::ReadTimedout | ErrorType::WriteTimedout | ErrorType::ConnectTimedout)
}

impl Proxy {
    /// A proxy to this world.
    pub fn new(world: Arc<World>) -> Self {
        Self { world }
    }

    /// Reads, routes and serves one request.
    async fn handle(&self, client: &mut ServerSession, context: &mut Context) -> Result<bool> {
        let arrived = Instant::now();
        let plan = self.world.plan.load_full();
        let id = request_id(client.req_header());
        match self.world.life.stage() {
            Stage::Warming | Stage::Serving => {}
            // It finds its next connection elsewhere. Who comes while connections are being closed has crossed with that.
            Stage::Leaving | Stage::Draining => client.set_keepalive(None),
            Stage::Ending => return self.turn_away(client, &id).await,
        }
        if let Some(fault) = relay::lint(client) {
            return self.refuse(client, codes::BAD_REQUEST, fault, &id).await;
        }
        if let Some(code) = relay::too_large(client, &plan.gateway.connections) {
            return self.refuse(client, code, code.doc, &id).await;
        }
        let mut head = client.req_header().clone();
        let listener = self.world.listener(local_address(client));
        let origin = origin(client, listener);
        if let Some(port) = listener.and_then(|l| l.redirect_https).filter(|_| !origin.secure) {
            return self.redirect(client, &head, port, &id).await;
        }
        let tells = listener.is_some_and(|l| l.forwarded);
        if tells {
            origin.tell(&mut head)?;
        }
        let name = listener.map_or("", |l| l.name.as_str());
        let rules: Vec<_> = plan.by_head(name, host(&head), head.uri.path()).collect();
        if rules.is_empty() {
            return self.refuse(client, codes::NO_ROUTE, "no rule matches this host and path", &id).await;
        }
        let ending = self.world.life.ending();
        let body = if is_websocket(client, &head) {
            None
        } else {
            let limits = body_limits(&rules);
            let read = tokio::select! {
                read = relay::read(client, &limits, &self.world.buffers) => Some(read),
                () = ending.come() => None,
            };
            match read {
                Some(Ok(body)) => Some(body),
                Some(Err(error)) => return self.no_body(client, error, &id).await,
                None => return self.turn_away(client, &id).await,
            }
        };
        let bytes = body.as_ref().map(|body| body.bytes.clone()).unwrap_or_default();
        let request = request(&head, id, origin.client, bytes).await;
        let Some(rule) = route(&rules, request.model.as_deref()) else {
            let message = format!("no rule serves the model {:?}", shown(request.model.as_deref()));
            return self.refuse(client, codes::MODEL_UNAVAILABLE, &message, &request.id).await;
        };
        let exposes = listener.is_some_and(|l| l.expose_routing);
        let mut attempts = Attempts::new(self.world.clone(), rule, request, arrived, exposes);
        if attempts.request().body.len() as u64 > attempts.rule().config.limits.body {
            let (code, id) = (codes::BODY_TOO_LARGE, attempts.request_id().to_owned());
            attempts.finish(code.status, None, Some(code.name));
            let text = Answer { request_id: Some(&id), ..Answer::new(code, code.doc) };
            return answer(client, &text).await.map(|()| true);
        }
        if origin.secure {
            attempts.strict_transport(listener.and_then(|l| l.hsts.as_deref()));
        }
        match body {
            Some(body) => self.relay(client, &head, attempts, body).await,
            None => {
                let timeouts = &attempts.rule().config.timeouts;
                client.set_read_timeout(Some(timeouts.idle));
                client.set_write_timeout(Some(timeouts.client_idle));
                context.stock =
                    Some(Stock { attempts, refused: None, unreached: false, tells: tells.then_some(origin) });
                Ok(false)
            }
        }
    }

    /// The process stops: the client is to connect again, and will be let in elsewhere.
    async fn turn_away(&self, client: &mut ServerSession, id: &str) -> Result<bool> {
        client.set_keepalive(None);
        self.refuse(client, codes::GATEWAY_DRAINING, codes::GATEWAY_DRAINING.doc, id).await
    }

    /// The body did not come.
    async fn no_body(&self, client: &mut ServerSession, error: relay::BodyError, id: &str) -> Result<bool> {
        match error.code() {
            Some(code) => self.refuse(client, code, code.doc, id).await,
            None => {
                self.world.unrouted.count(CLIENT_GONE);
                Err(Error::explain(ErrorType::ConnectionClosed, "the client left").into_down())
            }
        }
    }

    /// The body is in memory and the rule is known: choose, relay, record.
    async fn relay(
        &self,
        client: &mut ServerSession,
        head: &RequestHeader,
        mut attempts: Attempts,
        mut body: Body,
    ) -> Result<bool> {
        let ending = self.world.life.ending();
        let exchange = Exchange {
            client: &mut *client,
            connector: &self.world.connector,
            attempts: &mut attempts,
            head,
            body: &mut body,
            buffers: &self.world.buffers,
            ending: &ending,
        };
        let ended = exchange.serve().await?;
        drop(body);
        self.conclude(client, attempts, ended).await
    }

    /// Tells the client what it has not been told, and ends the record.
    async fn conclude(
        &self,
        client: &mut ServerSession,
        mut attempts: Attempts,
        ended: std::result::Result<relay::Relayed, Failure<Refused>>,
    ) -> Result<bool> {
        let id = attempts.request_id().to_owned();
        let id = id.as_str();
        if self.world.life.stage() >= Stage::Leaving && client.response_written().is_none() {
            // for what is answered below; a head that was sent has promised that another request may come
            client.set_keepalive(None);
        }
        match ended {
            Ok(relayed) => {
                if relayed.unfinished {
                    attempts.unfinished();
                }
                attempts.finish(relayed.status, Some(relayed.outcome()), None);
                Ok(true)
            }
            Err(Failure::Refused(refused)) => {
                let rule = attempts.rule().clone();
                let text = refusal(&refused, &rule);
                attempts.finish(text.status, None, Some(text.code));
                answer(client, &Answer { request_id: Some(id), ..text }).await.map(|()| true)
            }
            Err(Failure::Leg(error)) => {
                let code = codes::of(&error, attempts.role());
                let silent = error.side == relay::Side::Client || error.head_sent;
                if error.fault == Fault::Unfinished {
                    attempts.unfinished();
                }
                if silent {
                    let status = error.status.unwrap_or(0);
                    // the error event's, or that of a cut; an engine's own refusal, passed on, is not ours
                    let ours = error.side == relay::Side::Engine
                        && !matches!(error.fault, Fault::Status(_) | Fault::Lost);
                    let name = ours.then_some(code.name);
                    attempts.finish(status, Some(error.outcome()), name);
                    return if error.told { Ok(true) } else { Err(error.into_pingora()) };
                }
                attempts.finish(code.status, Some(error.outcome()), Some(code.name));
                let message = match (code, attempts.role()) {
                    (codes::PD_POOL_UNAVAILABLE, Role::Prefill) => "all prefill endpoints unreachable",
                    (codes::PD_POOL_UNAVAILABLE, _) => "decode endpoint unreachable",
                    _ => code.doc,
                };
                let retry_after =
                    error.busy.map(|wait| u32::try_from(relay::seconds(wait)).unwrap_or(u32::MAX));
                let text = Answer { request_id: Some(id), retry_after, ..Answer::new(code, message) };
                answer(client, &text).await.map(|()| true)
            }
        }
    }

    /// Sends the client to the port of TLS.
    async fn redirect(
        &self,
        client: &mut ServerSession,
        head: &RequestHeader,
        port: u16,
        id: &str,
    ) -> Result<bool> {
        let Some(location) = https(head, port) else {
            return self.refuse(client, codes::BAD_REQUEST, "no host to redirect to", id).await;
        };
        relay::redirect(client, &location, id).await.map(|()| true)
    }

    async fn refuse(&self, client: &mut ServerSession, code: Code, message: &str, id: &str) -> Result<bool> {
        self.world.unrouted.count(code.name);
        tracing::debug!(request = id, code = code.name, message, "refused");
        answer(client, &Answer { request_id: Some(id), ..Answer::new(code, message) }).await.map(|()| true)
    }
}

/// The rule of a request, of those that match its head, the most specific first: the first that serves its model; a
/// request that names none goes to the first, whatever that serves.
fn route(rules: &[&Arc<Rule>], model: Option<&str>) -> Option<Arc<Rule>> {
    let found = rules.iter().find(|rule| rule.config.matches.model(model));
    let first = || rules.first().filter(|_| model.is_none());
    found.or_else(first).map(|rule| Arc::clone(rule))
}

/// An upgrade to WebSocket: nothing of it is looked into. Other upgrades are none of ours, and are dropped like
/// every header between neighbours.
fn is_websocket(client: &mut ServerSession, head: &RequestHeader) -> bool {
    let named = |name| head.headers.get(name).and_then(|v| v.to_str().ok()).unwrap_or_default();
    let connection = named(header::CONNECTION);
    head.method == http::Method::GET
        && named(header::UPGRADE).eq_ignore_ascii_case("websocket")
        && connection.split(',').any(|token| token.trim().eq_ignore_ascii_case("upgrade"))
        && client.is_body_empty()
}

/// What the gateway looks for in a body.
#[derive(Default)]
struct Named {
    model: Option<Arc<str>>,
    user: Option<Arc<str>>,
    cache_salt: Option<Arc<str>>,
    adapter: Option<Arc<str>>,
    messages: Option<Bytes>,
    prompt: Option<Bytes>,
    tools: Option<Bytes>,
    is_json: bool,
}

impl Named {
    fn of(body: &Bytes) -> Self {
        let Some(fields) = Fields::read(body) else { return Self::default() };
        let text = |field: &Option<Cow<'_, str>>| field.as_deref().filter(|t| !t.is_empty()).map(Arc::from);
        let slice = |raw: Option<&str>| raw.map(|raw| body.slice_ref(raw.as_bytes()));
        Self {
            model: text(&fields.model),
            user: text(&fields.user_id).or_else(|| text(&fields.user)),
            cache_salt: text(&fields.cache_salt),
            adapter: text(&fields.adapter),
            messages: slice(fields.messages),
            prompt: slice(fields.prompt),
            tools: slice(fields.tools()),
            is_json: true,
        }
    }
}

async fn request(head: &RequestHeader, id: String, client: Option<IpAddr>, body: Bytes) -> Request {
    let whole = body.clone();
    let named = beside(body.len(), move || Named::of(&whole)).await.unwrap_or_default();
    let model = head.headers.get(MODEL).and_then(|v| v.to_str().ok()).filter(|m| !m.is_empty());
    Request {
        id,
        method: head.method.clone(),
        path: head.uri.path().to_owned(),
        query: head.uri.query().map(str::to_owned),
        headers: head.headers.clone(),
        client,
        model: model.map(Arc::from).or(named.model),
        user: named.user,
        cache_salt: named.cache_salt,
        adapter: named.adapter,
        messages: named.messages,
        prompt: named.prompt,
        tools: named.tools,
        is_json: named.is_json,
        body,
    }
}

/// The widest limits of the rules that a request may belong to: which one it is, its body tells.
fn body_limits(rules: &[&Arc<Rule>]) -> BodyLimits {
    let limits = || rules.iter().map(|rule| &rule.config.limits);
    let timeouts = || rules.iter().map(|rule| &rule.config.timeouts);
    BodyLimits {
        max: usize::try_from(limits().map(|l| l.body).max().unwrap_or(0)).unwrap_or(usize::MAX),
        deadline: timeouts().map(|t| t.body).max().unwrap_or_default(),
        grace: timeouts().map(|t| t.body_grace).max().unwrap_or_default(),
        // 0 is none, and so the least
        rate: limits().map(|l| l.body_rate).min().unwrap_or(0),
    }
}

/// Whose request it is.
fn origin(client: &ServerSession, listener: Option<&ListenerConfig>) -> Origin {
    let peer = client.client_addr().and_then(|a| a.as_inet()).map(std::net::SocketAddr::ip);
    let tls = client.digest().is_some_and(|digest| digest.ssl_digest.is_some());
    let proxies = listener.map_or(&[][..], |l| &l.trusted_proxies);
    Origin::of(&client.req_header().headers, peer, tls, proxies)
}

/// The same resource by https; `None` without a host that can be named.
fn https(head: &RequestHeader, port: u16) -> Option<String> {
    let authority: Authority = host(head)?.parse().ok()?;
    let name = authority.host();
    let path = head.uri.path_and_query().map_or("/", |path| path.as_str());
    let port = if port == 443 { String::new() } else { format!(":{port}") };
    let plain = path.starts_with('/') && !authority.as_str().contains('@') && !name.is_empty();
    plain.then(|| format!("https://{name}{port}{path}"))
}

fn local_address(client: &ServerSession) -> Option<std::net::SocketAddr> {
    client.server_addr().and_then(|a| a.as_inet()).copied()
}

fn host(head: &RequestHeader) -> Option<&str> {
    let named = head.headers.get(header::HOST).and_then(|v| v.to_str().ok());
    named.or_else(|| head.uri.authority().map(http::uri::Authority::as_str))
}

/// The client's `x-request-id` if it is fit to be passed on, else one of ours: 32 hex digits.
fn request_id(head: &RequestHeader) -> String {
    let named = head.headers.get(&REQUEST_ID).and_then(|v| v.to_str().ok());
    if let Some(id) = named.filter(|id| !id.is_empty() && id.len() <= 256 && !id.contains(PAIRED)) {
        return id.to_owned();
    }
    format!("{:032x}", unique())
}

#[async_trait]
impl ProxyHttp for Proxy {
    type CTX = Context;

    fn new_ctx(&self) -> Context {
        Context::default()
    }

    async fn request_filter(&self, session: &mut Session, context: &mut Context) -> Result<bool> {
        context.entered = Some(self.world.life.enter());
        self.handle(session.as_downstream_mut(), context).await
    }

    /// Only upgrades come here.
    async fn upstream_peer(&self, _: &mut Session, context: &mut Context) -> Result<Box<HttpPeer>> {
        let stock = context.stock.as_mut().ok_or_else(|| Error::new(ErrorType::InternalError))?;
        match relay::Route::choose(&mut stock.attempts).await {
            Ok(mut peer) => {
                let limits = stock.attempts.limits().deadlines;
                peer.options.read_timeout = Some(limits.idle);
                peer.options.write_timeout = Some(limits.idle);
                Ok(Box::new(peer))
            }
            Err(refused) => {
                stock.refused = Some(refused);
                Err(Error::explain(ErrorType::InternalError, "nobody was chosen"))
            }
        }
    }

    fn fail_to_connect(
        &self,
        _: &mut Session,
        _: &HttpPeer,
        context: &mut Context,
        mut error: Box<Error>,
    ) -> Box<Error> {
        if let Some(stock) = context.stock.as_mut() {
            stock.unreached = true;
            let cause = if relay::exhausted(&error) { Cause::Exhausted } else { Cause::EngineBroken };
            stock.attempts.end_attempt(Outcome { phase: Phase::Connect, status: None, cause });
            error.set_retry(cause != Cause::Exhausted);
        }
        error
    }

    async fn upstream_request_filter(
        &self,
        _: &mut Session,
        upstream: &mut RequestHeader,
        context: &mut Context,
    ) -> Result<()> {
        if let Some(stock) = &context.stock {
            upstream.insert_header(REQUEST_ID, stock.attempts.request_id())?;
            if let Some(origin) = &stock.tells {
                origin.tell(upstream)?;
            }
        }
        Ok(())
    }

    async fn response_filter(
        &self,
        _: &mut Session,
        response: &mut ResponseHeader,
        context: &mut Context,
    ) -> Result<()> {
        if let Some(stock) = context.stock.as_mut() {
            relay::Route::answered(&mut stock.attempts, response);
            stock.attempts.begins(response.status.as_u16());
        }
        Ok(())
    }

    async fn fail_to_proxy(
        &self,
        session: &mut Session,
        error: &Error,
        context: &mut Context,
    ) -> FailToProxy {
        let Some(stock) = &context.stock else {
            // the relay has said what there was to say
            return FailToProxy { error_code: 0, can_reuse_downstream: false };
        };
        let downstream = session.as_downstream_mut();
        let untold = downstream.response_written().is_none() && *error.esource() != ErrorSource::Downstream;
        let silent = FailToProxy { error_code: 0, can_reuse_downstream: false };
        if !untold {
            return silent;
        }
        let id = Some(stock.attempts.request_id());
        let text = stock.fault(error);
        match answer(downstream, &Answer { request_id: id, ..text }).await {
            Ok(()) => FailToProxy { error_code: text.status, can_reuse_downstream: false },
            Err(_) => silent,
        }
    }

    fn suppress_error_log(&self, _: &Session, _: &Context, _: &Error) -> bool {
        true
    }

    async fn logging(&self, session: &mut Session, error: Option<&Error>, context: &mut Context) {
        let Some(mut stock) = context.stock.take() else { return };
        let status = session.as_downstream().response_written().map_or(0, |head| head.status.as_u16());
        let (code, cause) = match error {
            None => (None, Some(Cause::Complete)),
            Some(e) if *e.esource() == ErrorSource::Downstream => (None, Some(Cause::ClientGone)),
            Some(e) => {
                let name = stock.fault(e).code;
                let cause = match timed_out(e) {
                    // a tunnel in which nobody says anything is nobody's failure
                    true if status == 101 => Cause::OutOfTime,
                    true => Cause::Deadline,
                    false => Cause::EngineBroken,
                };
                (Some(name), stock.refused.is_none().then_some(cause))
            }
        };
        let status_seen = (status > 0).then_some(status);
        let outcome = cause.map(|cause| Outcome { phase: Phase::Answer, status: status_seen, cause });
        stock.attempts.finish(status, outcome, code);
    }
}

/// What a client reads when nobody was chosen.
fn refusal<'a>(refused: &'a Refused, rule: &Rule) -> Answer<'a> {
    let Refused::Tier(refusal) = refused else {
        let (absence, pair) = (Absence::of(rule, Instant::now()), rule.config.pair.is_some());
        let (code, message) = match pair {
            _ if absence.busy => (codes::ENGINES_BUSY, codes::ENGINES_BUSY.doc),
            true => (codes::PD_POOL_UNAVAILABLE, "no healthy prefill or decode endpoint"),
            false => (codes::NO_HEALTHY_BACKEND, codes::NO_HEALTHY_BACKEND.doc),
        };
        return Answer { retry_after: absence.retry_after, ..Answer::new(code, message) };
    };
    Answer {
        status: refusal.status,
        code: refusal.code,
        message: &refusal.detail,
        retry_after: refusal.retry_after,
        request_id: None,
    }
}
