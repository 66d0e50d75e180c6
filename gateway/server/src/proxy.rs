//! A request from its head to its decision record.

use std::sync::Arc;
use std::time::Instant;

use async_trait::async_trait;
use bytes::Bytes;
use http::{HeaderName, HeaderValue, header};
use kvgate_core::{Cause, Outcome, Phase, Refused, Request};
use kvgate_prompt::Fields;
use pingora_core::protocols::http::ServerSession;
use pingora_core::upstreams::peer::HttpPeer;
use pingora_core::{Error, ErrorType, Result};
use pingora_http::{RequestHeader, ResponseHeader};
use pingora_proxy::{FailToProxy, ProxyHttp, Session};

use crate::attempts::Attempts;
use crate::plan::{Plan, Rule};
use crate::relay::{
    self, Answer, Body, BodyLimits, Code, Failure, HostPolicy, Leg, Sink, answer, serve, to_engine,
};
use crate::world::World;

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
const MODEL: &str = "x-model";

/// The proxy's logic: one for all listeners.
pub struct Proxy {
    world: Arc<World>,
}

/// What a request carries from hook to hook, where pingora's own path serves it.
#[derive(Default)]
pub struct Context {
    stock: Option<Stock>,
}

/// A request whose body we do not look into: an upgrade.
struct Stock {
    attempts: Attempts,
    chosen: Option<HttpPeer>,
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
        if let Some(fault) = relay::lint(client) {
            return self.refuse(client, Code::BAD_REQUEST, fault, &id).await;
        }
        let head = client.req_header().clone();
        let listener = plan.listener(local_address(client)).to_owned();
        let (host, path) = (host(&head).map(str::to_owned), head.uri.path().to_owned());
        let mut rules = plan.by_head(&listener, host.as_deref(), &path).peekable();
        let Some(first) = rules.peek().map(|rule| Arc::clone(rule)) else {
            return self.refuse(client, Code::NO_ROUTE, "no rule matches this host and path", &id).await;
        };
        if head.headers.contains_key(header::UPGRADE) {
            let request = request(client, &head, id, Bytes::new());
            let attempts =
                Attempts::new(self.world.clone(), first, request, arrived, exposes(&plan, &listener));
            context.stock = Some(Stock { attempts, chosen: None });
            return Ok(false);
        }
        let body = match relay::read(client, &body_limits(&first), &self.world.buffers).await {
            Ok(body) => body,
            Err(error) => {
                let Some(code) = error.code() else {
                    return Err(Error::explain(ErrorType::ConnectionClosed, "the client left").into_down());
                };
                return self.refuse(client, code, code.doc, &id).await;
            }
        };
        let request = request(client, &head, id, body.bytes.clone());
        let rule = match route(&first, rules, request.model.as_deref()) {
            Some(rule) => rule,
            None => {
                let message = format!("no rule serves the model {:?}", shown(request.model.as_deref()));
                return self.refuse(client, Code::MODEL_UNAVAILABLE, &message, &request.id).await;
            }
        };
        let attempts = Attempts::new(self.world.clone(), rule, request, arrived, exposes(&plan, &listener));
        self.relay(client, &head, attempts, body).await
    }

    /// The body is in memory and the rule is known: choose, relay, record.
    async fn relay(
        &self,
        client: &mut ServerSession,
        head: &RequestHeader,
        mut attempts: Attempts,
        body: Body,
    ) -> Result<bool> {
        let mut head = to_engine(head, body.bytes.len(), &HostPolicy::Preserve)?;
        head.insert_header(REQUEST_ID, attempts.request_id())?;
        let leg = Leg {
            head,
            body: body.bytes.clone(),
            sink: Sink::Client,
            refuse: &[],
            done_marker: kvgate_engines::end_marker(attempts.path()).is_some(),
        };
        let limits = attempts.limits();
        let ended = serve(client, &self.world.connector, &mut attempts, &leg, &limits).await;
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
        match ended {
            Ok(relayed) => {
                attempts.finish(relayed.status, Some(relayed.outcome()), None);
                Ok(true)
            }
            Err(Failure::Refused(Refused::NoEndpoint)) => {
                attempts.finish(Code::NO_HEALTHY_BACKEND.status, None, Some(Code::NO_HEALTHY_BACKEND.name));
                let text =
                    Answer::new(Code::NO_HEALTHY_BACKEND, "no endpoint of the rule can take the request");
                answer(client, &Answer { request_id: Some(id), ..text }).await.map(|()| true)
            }
            Err(Failure::Refused(Refused::Tier(refusal))) => {
                attempts.finish(refusal.status, None, Some(refusal.code));
                let text = Answer {
                    status: refusal.status,
                    code: refusal.code,
                    message: &refusal.detail,
                    retry_after: refusal.retry_after,
                    request_id: Some(id),
                };
                answer(client, &text).await.map(|()| true)
            }
            Err(Failure::Leg(error)) => {
                let code = Code::of(&error);
                let silent = error.side == relay::Side::Client || error.head_sent;
                if silent {
                    let status = error.status.unwrap_or(0);
                    attempts.finish(status, Some(error.outcome()), None);
                    return if error.told { Ok(true) } else { Err(error.into_pingora()) };
                }
                attempts.finish(code.status, Some(error.outcome()), Some(code.name));
                let text = Answer { request_id: Some(id), ..Answer::new(code, code.doc) };
                answer(client, &text).await.map(|()| true)
            }
        }
    }

    async fn refuse(&self, client: &mut ServerSession, code: Code, message: &str, id: &str) -> Result<bool> {
        self.world.unrouted.count(code.name);
        tracing::debug!(request = id, code = code.name, message, "refused");
        answer(client, &Answer { request_id: Some(id), ..Answer::new(code, message) }).await.map(|()| true)
    }
}

fn exposes(plan: &Plan, listener: &str) -> bool {
    plan.gateway.listeners.iter().any(|l| l.name == listener && l.expose_routing)
}

/// The rule of a request: the most specific that serves its model; a request that names none goes to the most
/// specific, whatever that serves.
fn route<'a>(
    first: &Arc<Rule>,
    mut rules: impl Iterator<Item = &'a Arc<Rule>>,
    model: Option<&str>,
) -> Option<Arc<Rule>> {
    let found = rules.find(|rule| rule.config.matches.model(model)).cloned();
    found.or_else(|| model.is_none().then(|| first.clone()))
}

fn request(client: &ServerSession, head: &RequestHeader, id: String, body: Bytes) -> Request {
    let fields = Fields::read(&body);
    let named = head.headers.get(MODEL).and_then(|v| v.to_str().ok()).filter(|m| !m.is_empty());
    let text =
        |field: Option<&std::borrow::Cow<'_, str>>| field.filter(|t| !t.is_empty()).map(|t| Arc::from(&**t));
    let of = |get: fn(&Fields<'_>) -> Option<Arc<str>>| fields.as_ref().and_then(get);
    let model =
        named.map(Arc::from).or_else(|| of(|f| f.model.as_deref().filter(|m| !m.is_empty()).map(Arc::from)));
    let user = fields.as_ref().and_then(|f| text(f.user_id.as_ref()).or_else(|| text(f.user.as_ref())));
    let cache_salt = fields.as_ref().and_then(|f| text(f.cache_salt.as_ref()));
    let is_json = fields.is_some();
    Request {
        id,
        method: head.method.clone(),
        path: head.uri.path().to_owned(),
        headers: head.headers.clone(),
        client: client.client_addr().and_then(|a| a.as_inet()).map(std::net::SocketAddr::ip),
        model,
        user,
        cache_salt,
        is_json,
        body,
    }
}

/// A model's name as messages and records show it: a client may send a megabyte.
pub fn shown(model: Option<&str>) -> &str {
    let model = model.unwrap_or_default();
    let end = model.char_indices().map(|(at, c)| at + c.len_utf8()).take_while(|end| *end <= 128).last();
    model.get(..end.unwrap_or(0)).unwrap_or_default()
}

fn body_limits(rule: &Rule) -> BodyLimits {
    BodyLimits {
        max: usize::try_from(rule.config.limits.body).unwrap_or(usize::MAX),
        deadline: rule.config.timeouts.body,
        grace: rule.config.timeouts.body,
        rate: 0,
    }
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
    if let Some(id) = named.filter(|id| !id.is_empty() && id.len() <= 256) {
        return id.to_owned();
    }
    use std::hash::BuildHasher;
    let random = std::hash::RandomState::new();
    format!("{:016x}{:016x}", random.hash_one(0), random.hash_one(1))
}

#[async_trait]
impl ProxyHttp for Proxy {
    type CTX = Context;

    fn new_ctx(&self) -> Context {
        Context::default()
    }

    async fn request_filter(&self, session: &mut Session, context: &mut Context) -> Result<bool> {
        self.handle(session.as_downstream_mut(), context).await
    }

    /// Only upgrades come here.
    async fn upstream_peer(&self, _: &mut Session, context: &mut Context) -> Result<Box<HttpPeer>> {
        let stock = context.stock.as_mut().ok_or_else(|| Error::new(ErrorType::InternalError))?;
        match relay::Route::choose(&mut stock.attempts).await {
            Ok(peer) => {
                stock.chosen = Some(peer.clone());
                Ok(Box::new(peer))
            }
            Err(_) => Err(Error::explain(
                ErrorType::HTTPStatus(503),
                "no endpoint of the rule can take the request",
            )),
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
            stock.attempts.end_attempt(Outcome {
                phase: Phase::Connect,
                status: None,
                cause: Cause::EngineBroken,
            });
            error.set_retry(true);
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
        let id = stock.attempts.request_id().to_owned();
        let code = match error.etype() {
            ErrorType::HTTPStatus(503) => Code::NO_HEALTHY_BACKEND,
            _ => Code::ENGINE_ERROR,
        };
        let downstream = session.as_downstream_mut();
        if downstream.response_written().is_none()
            && *error.esource() != pingora_core::ErrorSource::Downstream
        {
            let text = Answer { request_id: Some(&id), ..Answer::new(code, code.doc) };
            if answer(downstream, &text).await.is_ok() {
                return FailToProxy { error_code: code.status, can_reuse_downstream: false };
            }
        }
        FailToProxy { error_code: 0, can_reuse_downstream: false }
    }

    fn suppress_error_log(&self, _: &Session, _: &Context, _: &Error) -> bool {
        true
    }

    async fn logging(&self, session: &mut Session, error: Option<&Error>, context: &mut Context) {
        let Some(mut stock) = context.stock.take() else { return };
        let status = session.as_downstream().response_written().map_or(0, |head| head.status.as_u16());
        let cause = match error.map(|e| e.esource()) {
            None => Cause::Complete,
            Some(pingora_core::ErrorSource::Downstream) => Cause::ClientGone,
            Some(_) => Cause::EngineBroken,
        };
        let outcome = Outcome { phase: Phase::Answer, status: (status > 0).then_some(status), cause };
        stock.attempts.finish(status, Some(outcome), None);
    }
}

/// A header value made of our own words.
pub fn value(text: &str) -> HeaderValue {
    HeaderValue::from_str(text).unwrap_or_else(|_| HeaderValue::from_static(""))
}
