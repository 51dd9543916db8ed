//! Ops that lior alone uses, with the passes that fuse them.

pub mod evolve;
mod fuse_evolution;
mod fuse_retrieval;
pub mod retrieve;
pub mod ring;

use engine::Extension;
use engine::op::Entry;

pub static EXTENSION: Extension = Extension {
    ops: &[
        Entry { name: "evolve", about: "steps of a complex field, and its size at each", cases: evolve::CASES },
        Entry { name: "retrieve", about: "what queries find among candidates, under a metric in a rotated frame", cases: retrieve::CASES },
        Entry { name: "ring", about: "rows written around and around a table; counters", cases: ring::CASES },
    ],
    passes: &[&fuse_evolution::FuseEvolution, &fuse_retrieval::FuseRetrieval],
};
