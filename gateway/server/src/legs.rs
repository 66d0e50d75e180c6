//! A request in two legs: the prompt on one engine, the answer on another.

use bytes::Bytes;
use http::header;
use kvgate_core::{Phase, Refusal, Refused, Role};
use kvgate_engines::pd::{self, Next, PdFlow, PrefillAnswer};
use kvgate_engines::stream::Dialect;
use pingora_core::Result;
use pingora_core::connectors::http::Connector;
use pingora_core::protocols::http::ServerSession;
use pingora_http::RequestHeader;

use crate::attempts::Attempts;
use crate::facts::beside;
use crate::relay::{
    self, Body, Buffers, Code, Deadlines, Ending, Failure, Fault, HostPolicy, Kept, Leg, LegError, Limits,
    Refusals, Relayed, Side, Sink, codes, deliver, says_more, tell, telling, to_engine,
};

/// What decode answers when it cannot fetch a prompt's blocks: vLLM's `kv_load_failure_policy` "fail".
const LOST: u16 = 500;
/// Endpoints for prefill that may fail at a prompt.
const PREFILLS: u32 = 2;

type Ended = std::result::Result<Relayed, Failure<Refused>>;

/// A request that is served by its rule's endpoints.
pub struct Exchange<'a> {
    /// Who asks.
    pub client: &'a mut ServerSession,
    /// Connects to engines.
    pub connector: &'a Connector,
    /// Chooses them.
    pub attempts: &'a mut Attempts,
    /// The client's head.
    pub head: &'a RequestHeader,
    /// The client's body.
    pub body: &'a mut Body,
    /// The memory of bodies.
    pub buffers: &'a Buffers,
    /// When it has to be given up because the process ends.
    pub ending: &'a Ending,
}

/// What came of the prompt.
enum Prefilled {
    /// Decode is asked with this body, and finds the prompt's blocks by it.
    Computed(Bytes),
    /// Decode computes it.
    Left,
    /// The client gets the answer.
    Relay(Box<Relayed>),
    /// There is nobody for one of the parts, or nobody was of use.
    Nobody(Refused),
}

impl Exchange<'_> {
    /// Serves the request, in legs where its rule is a pair and it can be split. The client gets an engine's refusal when
    /// nobody did better.
    ///
    /// # Errors
    /// Of the library: a head that cannot be sent on. Else see [`Failure`].
    pub async fn serve(mut self) -> Result<Ended> {
        Ok(match self.parts().await? {
            Err(Failure::Leg(error)) => Err(Failure::Leg(tell(self.client, error).await)),
            ended => ended,
        })
    }

    async fn parts(&mut self) -> Result<Ended> {
        let Some(pair) = &self.attempts.rule().config.pair else {
            let (body, limits) = (self.body.bytes.clone(), self.attempts.limits());
            return self.leg(body, Sink::Client, false, &limits).await;
        };
        let (flow, recomputes) = (pair.connector.flow, pair.recomputes);
        let (path, body) = (self.attempts.request().path.clone(), self.body.bytes.clone());
        let prompt = beside(body.len(), move || flow.start(&path, &body)).await.flatten();
        let done = match prompt {
            Some(prompt) => {
                // each leg has a body of its own
                let more = prompt.len() + self.body.bytes.len();
                match self.body.also(more, self.buffers) {
                    Ok(()) => self.legs(flow, prompt).await?,
                    Err(_) if recomputes => {
                        self.attempts.transferred(false);
                        self.alone(flow).await?
                    }
                    Err(_) => return Ok(Err(Failure::Refused(Refused::Tier(ours(codes::OVERLOADED))))),
                }
            }
            None if pd::generates(&self.attempts.request().path) && !is_text(&self.body.bytes) => {
                return Ok(Err(Failure::Refused(Refused::Tier(ours(codes::UNREADABLE_BODY)))));
            }
            None => self.alone(flow).await?,
        };
        match done {
            Err(failure) if self.is_unserved(&failure) => self.rescue(flow, failure).await,
            done => Ok(done),
        }
    }

    /// Whether somebody else may serve the request that came to this.
    fn is_unserved(&self, failure: &Failure<Refused>) -> bool {
        let limits = self.attempts.limits();
        match failure {
            Failure::Refused(refused) => matches!(refused, Refused::NoEndpoint),
            Failure::Leg(error) => {
                let more = error.phase == Phase::Connect || self.attempts.answerers() < limits.attempts;
                error.retryable(limits.resend) && !error.is_last() && more
            }
        }
    }

    /// Nobody served a part: an endpoint of the role `any` serves the whole, else decode computes the prompt that is
    /// missing.
    async fn rescue(&mut self, flow: &'static dyn PdFlow, failure: Failure<Refused>) -> Result<Ended> {
        let (role, rule) = (self.attempts.role(), self.attempts.rule().clone());
        let recomputes =
            role == Role::Prefill && rule.config.pair.as_ref().is_some_and(|pair| pair.recomputes);
        let mut ended = Err(Failure::Refused(Refused::NoEndpoint));
        if rule.endpoints.iter().any(|endpoint| endpoint.role == Role::Any) {
            self.attempts.seek(Role::Any);
            ended = self.alone(flow).await?;
        }
        ended = match ended {
            Err(failure) if recomputes && self.is_unserved(&failure) => {
                self.attempts.transferred(false);
                match failure {
                    Failure::Leg(_) => self.attempts.seek(Role::Decode),
                    // nobody was asked in its place
                    Failure::Refused(_) => self.attempts.begin(Role::Decode),
                }
                let later = self.alone(flow).await?;
                self.better(Role::Any, failure, later)
            }
            ended => ended,
        };
        Ok(self.better(role, failure, ended))
    }

    /// What the client gets of a failure of this role's endpoints and of what came later: an engine's word before that
    /// there was nobody else, or nobody of use. Errors are named by the role whose failure it is.
    fn better(&mut self, role: Role, failure: Failure<Refused>, later: Ended) -> Ended {
        match (failure, later) {
            // that nobody helps out is not what was amiss
            (Failure::Leg(error), later) if role == Role::Any && error.phase == Phase::Connect => later,
            (Failure::Leg(error), Err(Failure::Refused(_))) => {
                self.attempts.seek(role);
                Err(Failure::Leg(error))
            }
            (Failure::Leg(error), Err(Failure::Leg(later))) => {
                if says_more(&error, &later) {
                    self.attempts.seek(role);
                }
                Err(Failure::Leg(telling(error, later)))
            }
            (_, later) => later,
        }
    }

    /// One leg to whoever is sought, who computes the prompt too; as often as endpoints may still be asked.
    async fn alone(&mut self, flow: &'static dyn PdFlow) -> Result<Ended> {
        let (body, limits) = (self.own(flow).await, self.attempts.limits());
        let attempts = limits.attempts.saturating_sub(self.attempts.answerers()).max(1);
        self.leg(body, Sink::Client, false, &Limits { attempts, ..limits }).await
    }

    async fn own(&self, flow: &'static dyn PdFlow) -> Bytes {
        let body = self.body.bytes.clone();
        beside(body.len(), move || flow.alone(&body)).await.unwrap_or_else(|| self.body.bytes.clone())
    }

    async fn leg(&mut self, body: Bytes, sink: Sink, once: bool, limits: &Limits) -> Result<Ended> {
        let mut head = to_engine(self.head, body.len(), &HostPolicy::Preserve)?;
        if sink != Sink::Client {
            // its answer is for us to read
            head.remove_header(&header::ACCEPT_ENCODING);
        }
        let rule = self.attempts.rule().clone();
        let request = self.attempts.request().clone();
        let refuse = Attempts::refusals(&rule, &request);
        let refuse = Refusals { lost: once.then_some(LOST), ..refuse };
        let (role, dialect) = (self.attempts.role(), Dialect::of(&request.path));
        let mut leg = Leg { head, body, sink, ending: self.ending, refuse, once, role, dialect };
        // on the heap: all that a request may have to do in a row, inlined, is more than a thread's stack bears
        Ok(Box::pin(relay::serve(self.client, self.connector, self.attempts, &mut leg, limits)).await)
    }

    async fn legs(&mut self, flow: &'static dyn PdFlow, prompt: Bytes) -> Result<Ended> {
        self.attempts.begin(Role::Prefill);
        match self.prefill(flow, prompt).await? {
            Ok(Prefilled::Computed(body)) => self.decode(flow, body).await,
            Ok(Prefilled::Left) => {
                self.attempts.transferred(false);
                self.attempts.begin(Role::Decode);
                self.alone(flow).await
            }
            Ok(Prefilled::Relay(relayed)) => {
                self.attempts.end_reserved();
                self.attempts.first_byte();
                Ok(deliver(self.client, *relayed).await.map_err(Failure::Leg))
            }
            Ok(Prefilled::Nobody(refused)) => Ok(Err(Failure::Refused(refused))),
            Err(error) => Ok(Err(Failure::Leg(error))),
        }
    }

    /// Has the prompt computed.
    async fn prefill(
        &mut self,
        flow: &'static dyn PdFlow,
        prompt: Bytes,
    ) -> Result<std::result::Result<Prefilled, LegError>> {
        let (recomputes, most) = match &self.attempts.rule().config.pair {
            Some(pair) => (pair.recomputes, usize::try_from(pair.prefill_answer).unwrap_or(usize::MAX)),
            None => (true, 0),
        };
        let (mut failed, mut answered) = (None::<LegError>, None);
        for _ in 0..PREFILLS {
            let limits = self.prefill_limits();
            let answer = match self.leg(prompt.clone(), Sink::Memory(most), false, &limits).await? {
                Ok(relayed) => Some(relayed),
                Err(Failure::Refused(refused)) if failed.is_none() && answered.is_none() => {
                    return Ok(Ok(Prefilled::Nobody(refused)));
                }
                Err(Failure::Refused(_)) => break,
                Err(Failure::Leg(error)) if error.side == Side::Client || error.is_last() => {
                    return Ok(Err(error));
                }
                // another's answer would be as long
                Err(Failure::Leg(error)) if error.fault == Fault::TooLarge && recomputes => {
                    return Ok(Ok(Prefilled::Left));
                }
                Err(Failure::Leg(error)) if error.fault == Fault::TooLarge => return Ok(Err(error)),
                Err(Failure::Leg(error)) => {
                    failed = Some(match failed {
                        Some(word) => telling(word, error),
                        None => error,
                    });
                    None
                }
            };
            match next(flow, &self.body.bytes, answer.as_ref()).await {
                Next::Decode(body) => return Ok(Ok(Prefilled::Computed(body))),
                Next::Alone => return Ok(Ok(Prefilled::Left)),
                Next::Relay => match answer {
                    Some(answer) => return Ok(Ok(Prefilled::Relay(Box::new(answer)))),
                    None => break,
                },
                Next::RetryPrefill => answered = answer.or(answered),
            }
        }
        match (answered, failed) {
            (Some(answer), _) if !recomputes => Ok(Ok(Prefilled::Relay(Box::new(answer)))),
            (None, Some(error)) if !recomputes => Ok(Err(error)),
            // what the client gets when nobody computes the prompt
            (_, Some(error)) if error.kept.is_some() => Ok(Err(error)),
            _ => Ok(Ok(Prefilled::Nobody(Refused::NoEndpoint))),
        }
    }

    fn prefill_limits(&self) -> Limits {
        let (limits, prefill) = (self.attempts.limits(), self.attempts.rule().config.timeouts.prefill);
        let deadlines = Deadlines { first_byte: prefill, idle: prefill, ..limits.deadlines };
        Limits { deadlines, attempts: 1, ..limits }
    }

    /// Has the answer computed, by an engine that fetches the prompt's blocks.
    async fn decode(&mut self, flow: &'static dyn PdFlow, body: Bytes) -> Result<Ended> {
        self.attempts.transferred(true);
        self.attempts.begin(Role::Decode);
        let limits = self.attempts.limits();
        // blocks are handed over once: an engine that had the request may have fetched them
        let once = Limits { resend: false, ..limits };
        let error = match self.leg(body, Sink::Client, true, &once).await? {
            Err(Failure::Leg(error)) if error.retryable(limits.resend) => error,
            ended => return Ok(ended),
        };
        let lost = error.fault == Fault::Lost;
        let more = error.phase != Phase::Connect && self.attempts.answerers() < limits.attempts;
        let again = error.stale || lost || more;
        if !again {
            return Ok(Err(Failure::Leg(error)));
        }
        if error.stale || lost {
            self.attempts.forgive();
        }
        self.attempts.transferred(false);
        let later = self.alone(flow).await?;
        Ok(self.better(Role::Decode, Failure::Leg(error), later))
    }
}

/// Whether the body is in the only encoding whose members we see. Readers of JSON that guess find others where there are
/// NULs, and take encoded halves of surrogate pairs.
fn is_text(body: &[u8]) -> bool {
    !body.contains(&0) && std::str::from_utf8(body).is_ok()
}

/// A refusal of the gateway's own.
fn ours(Code { name: code, status, doc }: Code) -> Refusal {
    Refusal { status, code, detail: doc.into(), retry_after: None }
}

/// What is to be done after a prefill.
async fn next(flow: &'static dyn PdFlow, body: &Bytes, answer: Option<&Relayed>) -> Next {
    let Some(Relayed { status, kept: Some(Kept { body: said, .. }), .. }) = answer else {
        return flow.next(body, PrefillAnswer::Failed);
    };
    let len = body.len() + said.len();
    let (body, said, status) = (body.clone(), said.clone(), *status);
    let read = move || flow.next(&body, PrefillAnswer::Answered { status, body: &said });
    beside(len, read).await.unwrap_or(Next::RetryPrefill)
}
