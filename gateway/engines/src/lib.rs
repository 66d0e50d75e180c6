//! All that differs by engine: contract, event feed, metric names, paths, chat preparation.
