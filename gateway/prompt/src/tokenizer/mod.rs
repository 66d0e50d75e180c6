mod cache;
mod config;
mod encoder;
mod files;
mod model;
mod slug;
mod store;
mod turns;

pub use cache::CacheStats;
pub use files::LoadError;
pub use model::Model;
pub use slug::{Slug, SlugError};
pub use store::{State, Tokenizers, TokenizersConfig};
