//! Ranks: processes or threads that train one model together, each on a part of every step.
//!
//! The graph of a rank is what the passes `data-parallel`, `tensor-parallel` and `zero` make of the recorded one. They place collectives in it, ops that
//! exchange values through a [`Group`].

pub mod mpi;
mod parts;
pub mod threads;

pub use parts::{Axis, Part, Parts, Share, cut, whole};

use crate::cuda::nccl;
use crate::error::Error;
use crate::meta::Meta;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// How the ranks of a group exchange bytes on the CPU. Every rank calls the same functions in the same order.
pub trait Exchange: Send + Sync {
    /// Every rank's `send`, one after the other in the order of ranks.
    fn all_gather(&self, send: &[u8], receive: &mut [u8]) -> Result<(), Error>;

    /// Part i of `send` goes to rank i; `receive` has one part of every rank, in their order.
    fn all_to_all(&self, send: &[u8], receive: &mut [u8]) -> Result<(), Error>;

    /// How they exchange values that lie on GPUs, where each rank has one.
    fn on_gpus(&self) -> Option<&nccl::Link> {
        None
    }
}

/// Some ranks that exchange values, and which of them this one is.
#[derive(Clone)]
pub struct Group {
    /// What it is for, such as `data`.
    pub name: &'static str,
    /// Which of its ranks this is.
    pub rank: usize,
    /// How many there are.
    pub size: usize,
    /// Whether a GPU exchanges beside its other work.
    pub(crate) aside: bool,
    exchange: Option<Arc<dyn Exchange>>,
}

/// What a rank of a run is told.
#[derive(Clone, Debug, Default)]
pub struct Ranks {
    /// Ranks that have different examples.
    pub data: Group,
    /// Ranks that have different parts of the weights.
    pub tensor: Group,
    /// How states were divided by the programs that were compiled so far, since all programs of a run share them.
    pub(crate) settled: Settled,
}

impl PartialEq for Ranks {
    fn eq(&self, other: &Ranks) -> bool {
        (&self.data, &self.tensor) == (&other.data, &other.tensor)
    }
}

/// What a rank has of states, by group, name and shape.
#[derive(Clone, Debug, Default)]
pub(crate) struct Settled(Arc<Mutex<Known>>);

type Known = BTreeMap<(&'static str, String, Vec<usize>), Share>;

impl Settled {
    fn all(&self) -> MutexGuard<'_, Known> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What a rank has of a state, where an earlier program has settled that.
    pub fn of(&self, group: &Group, state: &str, meta: &Meta) -> Option<Share> {
        self.all().get(&(group.name, state.into(), meta.shape.clone())).copied()
    }

    /// All programs from here on have so much of it.
    pub fn settle(&self, group: &Group, state: &str, meta: &Meta, share: Share) {
        self.all().entry((group.name, state.into(), meta.shape.clone())).or_insert(share);
    }
}

impl Ranks {
    /// One rank of both groups.
    pub fn new(data: Group, tensor: Group) -> Ranks {
        Ranks { data, tensor, settled: Settled::default() }
    }

    /// How many there are.
    pub fn size(&self) -> usize {
        self.data.size * self.tensor.size
    }

    /// Whether there is nobody to exchange anything with.
    pub fn is_alone(&self) -> bool {
        self.data.is_alone() && self.tensor.is_alone()
    }

    /// Which of them this is. Ranks that share a model's weights are next to each other.
    pub fn rank(&self) -> usize {
        self.data.rank * self.tensor.size + self.tensor.rank
    }

    /// Bytes of all ranks, in their order, where each has any number of them.
    pub fn gather(&self, own: &[u8]) -> Result<Vec<Vec<u8>>, Error> {
        let mut beside = vec![];
        for bytes in self.tensor.gather_bytes(own)? {
            beside.extend((bytes.len() as u64).to_le_bytes());
            beside.extend(bytes);
        }
        let mut all = vec![];
        for bytes in self.data.gather_bytes(&beside)? {
            let mut rest = &bytes[..];
            while let Some((length, after)) = rest.split_first_chunk::<8>() {
                let (one, after) = after.split_at(u64::from_le_bytes(*length) as usize);
                all.push(one.to_vec());
                rest = after;
            }
        }
        Ok(all)
    }

    /// As they would be in a run of `data` times `tensor` ranks, for plans: programs for it cannot run.
    pub fn planned(data: usize, tensor: usize) -> Ranks {
        let group = |name, size| Group { size, ..Group::alone(name) };
        Ranks::new(group("data", data), group("tensor", tensor))
    }
}

impl Default for Group {
    fn default() -> Group {
        Group::alone("data")
    }
}

impl PartialEq for Group {
    fn eq(&self, other: &Group) -> bool {
        (self.rank, self.size, self.name, self.aside) == (other.rank, other.size, other.name, other.aside)
    }
}

impl fmt::Debug for Group {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{} {}/{}{}", self.name, self.rank, self.size, if self.aside { " aside" } else { "" })
    }
}

impl Group {
    /// A group whose ranks reach each other by `exchange`.
    pub fn new(name: &'static str, rank: usize, size: usize, exchange: Arc<dyn Exchange>) -> Group {
        assert!(rank < size, "rank {rank} of {size}");
        Group { name, rank, size, aside: false, exchange: Some(exchange) }
    }

    /// One rank without others.
    pub fn alone(name: &'static str) -> Group {
        Group { name, rank: 0, size: 1, aside: false, exchange: None }
    }

    /// Whether there is nobody to exchange anything with, and no connection that is to be used nevertheless.
    pub fn is_alone(&self) -> bool {
        self.size == 1 && self.exchange.is_none()
    }

    /// The same ranks, for what a GPU exchanges beside its other work.
    pub(crate) fn aside(&self) -> Group {
        Group { aside: true, ..self.clone() }
    }

    /// How its ranks exchange values that lie on GPUs.
    pub(crate) fn on_gpus(&self) -> Option<&nccl::Link> {
        self.exchange.as_ref()?.on_gpus()
    }

    /// Adds up the numbers of all ranks, in the order of the ranks: bit for bit the same on all of them.
    pub(crate) fn all_reduce<T: Number>(&self, x: &mut [T]) {
        if self.size == 1 {
            return;
        }
        // Each rank adds up one part of all, then all parts are gathered.
        let part = x.len().div_ceil(self.size);
        let mut send = vec![T::zeroed(); part * self.size];
        send[..x.len()].copy_from_slice(x);
        let mut sum = vec![T::zeroed(); part];
        self.reduce_scatter(&send, &mut sum);
        self.all_gather(&sum, &mut send);
        x.copy_from_slice(&send[..x.len()]);
    }

    /// Every rank gets the sums of one part of `x`.
    pub(crate) fn reduce_scatter<T: Number>(&self, x: &[T], y: &mut [T]) {
        let mut parts = vec![T::zeroed(); x.len()];
        self.all_to_all(x, &mut parts);
        let (first, others) = parts.split_at(y.len());
        y.copy_from_slice(first);
        let all = crate::mutant!("a-rank-is-left-out-of-sums", others.len(), others.len().saturating_sub(y.len()));
        others[..all].chunks(y.len()).for_each(|part| y.iter_mut().zip(part).for_each(|(sum, v)| *sum = sum.plus(*v)));
    }

    /// The parts of all ranks.
    pub(crate) fn all_gather<T: Number>(&self, x: &[T], y: &mut [T]) {
        match (&self.exchange, self.size) {
            (_, 1) => y.copy_from_slice(x),
            (Some(e), _) => or_unwind(e.all_gather(bytemuck::cast_slice(x), bytemuck::cast_slice_mut(y))),
            (None, _) => or_unwind(Err(self.only_planned())),
        }
    }

    /// Part i of `x` goes to rank i.
    pub(crate) fn all_to_all<T: Number>(&self, x: &[T], y: &mut [T]) {
        match (&self.exchange, self.size) {
            (_, 1) => y.copy_from_slice(x),
            (Some(e), _) => or_unwind(e.all_to_all(bytemuck::cast_slice(x), bytemuck::cast_slice_mut(y))),
            (None, _) => or_unwind(Err(self.only_planned())),
        }
    }

    /// Bytes of all ranks, in their order, where each has any number of them.
    pub fn gather_bytes(&self, own: &[u8]) -> Result<Vec<Vec<u8>>, Error> {
        let Some(e) = &self.exchange else { return if self.size == 1 { Ok(vec![own.to_vec()]) } else { Err(self.only_planned()) } };
        let mut lengths = vec![0u8; 8 * self.size];
        e.all_gather(&(own.len() as u64).to_le_bytes(), &mut lengths)?;
        let lengths: Vec<usize> = lengths.chunks(8).map(|l| u64::from_le_bytes(l.try_into().expect("eight bytes")) as usize).collect();
        let most = lengths.iter().copied().max().unwrap_or(0);
        let mut send = own.to_vec();
        send.resize(most, 0);
        let mut all = vec![0; most * self.size];
        e.all_gather(&send, &mut all)?;
        Ok(lengths.iter().enumerate().map(|(i, &n)| all[i * most..][..n].to_vec()).collect())
    }

    /// Waits until all ranks are here.
    pub fn wait(&self) -> Result<(), Error> {
        self.gather_bytes(&[]).map(|_| ())
    }

    fn only_planned(&self) -> Error {
        Error::Ranks(format!("{} ranks are planned, and this program has no connection to them", self.size))
    }
}

/// An op has no error to return: the executor that called it catches this one.
fn or_unwind(result: Result<(), Error>) {
    if let Err(e) = result {
        std::panic::resume_unwind(Box::new(e));
    }
}

/// Numbers that ranks add up.
pub trait Number: bytemuck::Pod {
    /// The sum of both.
    fn plus(self, other: Self) -> Self;
}

impl Number for f32 {
    fn plus(self, other: f32) -> f32 {
        self + other
    }
}

impl Number for i32 {
    fn plus(self, other: i32) -> i32 {
        self.wrapping_add(other)
    }
}
