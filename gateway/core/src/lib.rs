//! The nouns of routing: facts, tiers, the ladder, leases, the decision record.
