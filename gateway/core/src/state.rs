//! What outlives a plan: state by key, and the services tiers are built on.

use std::any::{Any, TypeId};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

type Key = (TypeId, String, String);

/// State by type, key and shape. Same key and same shape give the same state for as long as anyone holds
/// it: that is the whole carry-over of sessions, tries and rings over a reload.
#[derive(Debug, Default)]
pub struct StateStore(Mutex<HashMap<Key, Weak<dyn Any + Send + Sync>>>);

impl StateStore {
    /// The state of this key and shape, made by `init` if nobody holds it. `shape` spells out every setting
    /// that state of another setting could not serve.
    pub fn get<S: Any + Send + Sync>(&self, key: &str, shape: &str, init: impl FnOnce() -> S) -> Arc<S> {
        let id = (TypeId::of::<S>(), key.to_owned(), shape.to_owned());
        let mut states = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(state) = states.get(&id).and_then(Weak::upgrade).and_then(|s| s.downcast().ok()) {
            return state;
        }
        states.retain(|_, state| state.strong_count() > 0);
        let state = Arc::new(init());
        let any: Arc<dyn Any + Send + Sync> = state.clone();
        states.insert(id, Arc::downgrade(&any));
        state
    }
}

/// What the gateway offers tiers, by type: the inventory, say.
#[derive(Clone, Default)]
pub struct Services(HashMap<TypeId, Arc<dyn Any + Send + Sync>>);

impl Services {
    /// Adds a service, in place of one of the same type.
    #[must_use]
    pub fn with<S: Any + Send + Sync>(mut self, service: Arc<S>) -> Self {
        self.0.insert(TypeId::of::<S>(), service);
        self
    }

    /// The service of this type.
    pub fn get<S: Any + Send + Sync>(&self) -> Option<Arc<S>> {
        self.0.get(&TypeId::of::<S>())?.clone().downcast().ok()
    }
}

impl std::fmt::Debug for Services {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Services({})", self.0.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn same_key_and_shape_same_state() {
        let store = StateStore::default();
        let a = store.get("sessions/qwen3", "ttl=300", || 1u32);
        assert_eq!(*store.get("sessions/qwen3", "ttl=300", || 2u32), 1);
        assert_eq!(*store.get("sessions/qwen3", "ttl=60", || 3u32), 3);
        assert_eq!(*store.get("sessions/qwen3", "ttl=300", || 4u64), 4);
        drop(a);
        assert_eq!(*store.get("sessions/qwen3", "ttl=300", || 5u32), 5);
    }

    #[test]
    fn services_are_found_by_type() {
        let services = Services::default().with(Arc::new(7u32));
        assert_eq!(services.get::<u32>().as_deref(), Some(&7));
        assert!(services.get::<u64>().is_none());
    }
}
