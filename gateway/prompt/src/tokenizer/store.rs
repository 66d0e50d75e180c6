use std::collections::HashMap;
use std::fs;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant, SystemTime};

use super::{Model, Slug};
use crate::template::Limits;

/// Bounds and clocks of a store.
#[derive(Debug, Clone)]
pub struct TokenizersConfig {
    /// Most models held at once; one takes roughly ten times its `tokenizer.json`. More are refused.
    pub max_models: usize,
    /// Most bytes of cached segments per model (text and ids); 0 turns the cache off.
    pub cache_bytes: usize,
    /// Largest text that is tokenised, in bytes.
    pub max_text: usize,
    /// How long a failed load is left alone.
    pub retry: Duration,
    /// Bounds of one rendering.
    pub template: Limits,
    /// The clock that `strftime_now` reads in templates, as UTC: what an engine in a container does.
    pub clock: fn() -> SystemTime,
}

impl Default for TokenizersConfig {
    fn default() -> Self {
        Self {
            max_models: 32,
            cache_bytes: 64 << 20,
            max_text: 16 << 20,
            retry: Duration::from_secs(30),
            template: Limits::default(),
            clock: SystemTime::now,
        }
    }
}

/// What the store knows of a model.
#[derive(Debug, Clone)]
pub enum State {
    /// Loaded.
    Ready(Arc<Model>),
    /// Being loaded by another thread.
    Loading,
    /// No such model in the store, or its name can have no folder there.
    Missing(Arc<str>),
    /// The load failed; it is tried again later.
    Failed(Arc<str>),
}

/// A folder of tokenizers, `<slug>/tokenizer.json` and what lies beside it. Models are loaded when first asked for, by
/// a thread of the store's own, one at a time. Clones share one store.
#[derive(Debug, Clone)]
pub struct Tokenizers(Arc<Store>);

#[derive(Debug)]
struct Store {
    folder: PathBuf,
    config: TokenizersConfig,
    /// By model name. Only names with a folder in the store are ever held.
    models: RwLock<HashMap<Box<str>, Entry>>,
    /// Held while a model is being read: one load at a time bounds memory and CPU.
    loading: Mutex<()>,
    /// Held by whoever waits for `settled`, so that none of its calls is missed.
    waiting: Mutex<()>,
    /// A load has ended.
    settled: Condvar,
}

#[derive(Debug, Clone)]
struct Entry {
    slug: Slug,
    state: Held,
}

impl Entry {
    /// Did the last load fail long enough ago to be tried again?
    fn is_due(&self, retry: Duration) -> bool {
        matches!(&self.state, Held::Failed { since, .. } if since.elapsed() >= retry)
    }
}

#[derive(Debug, Clone)]
enum Held {
    Loading,
    Ready(Arc<Model>),
    Failed { reason: Arc<str>, since: Instant },
}

impl Held {
    fn state(&self) -> State {
        match self {
            Self::Loading => State::Loading,
            Self::Ready(model) => State::Ready(model.clone()),
            Self::Failed { reason, .. } => State::Failed(reason.clone()),
        }
    }
}

impl Tokenizers {
    /// A store over `folder`, which need not exist yet. Nothing is read.
    pub fn new(folder: impl Into<PathBuf>, config: TokenizersConfig) -> Self {
        Self(Arc::new(Store {
            folder: folder.into(),
            config,
            models: RwLock::default(),
            loading: Mutex::new(()),
            waiting: Mutex::new(()),
            settled: Condvar::new(),
        }))
    }

    /// The state of a model, by the name clients use. Never waits for a load: the first call starts one on a thread of
    /// its own and answers [`State::Loading`]. Names without a folder cost one look at the folder and leave no trace.
    pub fn get(&self, model: &str) -> State {
        if let Some(state) = self.0.known(model) {
            return state;
        }
        match self.0.claim(model) {
            Claim::Known(state) => state,
            Claim::Ours(slug) => {
                let (store, name) = (self.0.clone(), model.to_owned());
                let spawned = std::thread::Builder::new()
                    .name("load-tokenizer".into())
                    .spawn(move || drop(store.load(&name, &slug)));
                match spawned {
                    Ok(_) => State::Loading,
                    Err(e) => self.0.settle(model, Err(format!("no thread to load it: {e}"))),
                }
            }
        }
    }

    /// As [`get`](Self::get), but loads the model in the caller's thread if it is not there yet: for checks and for
    /// preparing before traffic.
    pub fn load(&self, model: &str) -> State {
        if let Some(state @ State::Ready(_)) = self.0.known(model) {
            return state;
        }
        match self.0.claim(model) {
            Claim::Ours(slug) => self.0.load(model, &slug),
            Claim::Known(State::Loading) => self.0.wait(model),
            Claim::Known(state) => state,
        }
    }

    /// Looks at the files of every model held and loads anew those that changed; the old one serves until the new one
    /// is ready, and goes on serving if the new one cannot be read. Models whose folder is gone are dropped. Blocks.
    /// Returns the models that changed, with the reason where the new files cannot be used.
    pub fn refresh(&self) -> Vec<(String, Result<(), Arc<str>>)> {
        self.0.refresh()
    }

    /// Every model held, by name: for metrics and status pages.
    pub fn held(&self) -> Vec<(String, State)> {
        let models = self.0.models.read().unwrap_or_else(PoisonError::into_inner);
        let mut held: Vec<_> = models.iter().map(|(name, e)| (name.to_string(), e.state.state())).collect();
        held.sort_by(|a, b| a.0.cmp(&b.0));
        held
    }
}

enum Claim {
    Known(State),
    Ours(Slug),
}

impl Store {
    /// The state of a model already held, unless it failed long enough ago to be tried again.
    fn known(&self, model: &str) -> Option<State> {
        let models = self.models.read().unwrap_or_else(PoisonError::into_inner);
        let entry = models.get(model)?;
        (!entry.is_due(self.config.retry)).then(|| entry.state.state())
    }

    /// Marks the model as being loaded, if it has a folder and nobody else is at it.
    fn claim(&self, model: &str) -> Claim {
        let slug = match Slug::new(model) {
            Ok(slug) => slug,
            Err(e) => return Claim::Known(State::Missing(e.to_string().into())),
        };
        if let Err(reason) = self.locate(&slug) {
            return Claim::Known(State::Missing(reason.into()));
        }
        let mut models = self.models.write().unwrap_or_else(PoisonError::into_inner);
        let held = models.len();
        match models.get_mut(model) {
            Some(entry) if entry.is_due(self.config.retry) => {
                entry.state = Held::Loading;
                Claim::Ours(slug)
            }
            Some(entry) => Claim::Known(entry.state.state()),
            None if held >= self.config.max_models => {
                let reason = format!("{held} models are held, as many as allowed");
                Claim::Known(State::Failed(reason.into()))
            }
            None => {
                models.insert(model.into(), Entry { slug: slug.clone(), state: Held::Loading });
                Claim::Ours(slug)
            }
        }
    }

    /// The model's folder, resolved; an error if there is none, or if it leads out of the store.
    fn locate(&self, slug: &Slug) -> Result<PathBuf, String> {
        let folder = self.folder.join(slug.as_str());
        let missing = |e| format!("{}: {e}", folder.display());
        let real = fs::canonicalize(&folder).map_err(missing)?;
        let store = fs::canonicalize(&self.folder).map_err(missing)?;
        if !real.starts_with(&store) || real == store {
            return Err(format!("{} leads out of the store", folder.display()));
        }
        Ok(real)
    }

    fn load(&self, name: &str, slug: &Slug) -> State {
        let _one = self.loading.lock().unwrap_or_else(PoisonError::into_inner);
        let loaded = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| self.read(slug)))
            .unwrap_or_else(|_| Err("the tokenizer library panicked".into()));
        self.settle(name, loaded)
    }

    fn read(&self, slug: &Slug) -> Result<Arc<Model>, String> {
        let folder = self.locate(slug)?;
        Model::load(&folder, &self.config).map(Arc::new).map_err(|e| e.to_string())
    }

    fn settle(&self, name: &str, loaded: Result<Arc<Model>, String>) -> State {
        let held = match loaded {
            Ok(model) => Held::Ready(model),
            Err(reason) => Held::Failed { reason: reason.into(), since: Instant::now() },
        };
        let state = held.state();
        let mut models = self.models.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(entry) = models.get_mut(name) {
            entry.state = held;
        }
        drop(models);
        drop(self.waiting.lock().unwrap_or_else(PoisonError::into_inner));
        self.settled.notify_all();
        state
    }

    /// The state of a model that another thread loads, once it has.
    fn wait(&self, model: &str) -> State {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            match self.known(model) {
                Some(State::Loading) => {
                    waiting = self.settled.wait(waiting).unwrap_or_else(PoisonError::into_inner);
                }
                Some(state) => return state,
                None => return State::Failed("the load failed, and it is time to try again".into()),
            }
        }
    }

    fn refresh(&self) -> Vec<(String, Result<(), Arc<str>>)> {
        let held: Vec<(String, Slug, Arc<Model>)> = {
            let models = self.models.read().unwrap_or_else(PoisonError::into_inner);
            let ready = models.iter().filter_map(|(name, e)| match &e.state {
                Held::Ready(model) => Some((name.to_string(), e.slug.clone(), model.clone())),
                _ => None,
            });
            ready.collect()
        };
        let mut changed = Vec::new();
        for (name, slug, model) in held {
            match self.locate(&slug) {
                Err(reason) => {
                    self.models.write().unwrap_or_else(PoisonError::into_inner).remove(name.as_str());
                    changed.push((name, Err(reason.into())));
                }
                Ok(folder) if super::files::identity(&folder) != *model.identity() => {
                    let _one = self.loading.lock().unwrap_or_else(PoisonError::into_inner);
                    let result = self.read(&slug).map(|new| drop(self.settle(&name, Ok(new))));
                    changed.push((name, result.map_err(Into::into)));
                }
                Ok(_) => (),
            }
        }
        changed
    }
}
