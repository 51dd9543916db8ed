//! Ranks as threads of one process.

use super::{Exchange, Group, Ranks};
use crate::error::Error;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// What the threads of a group put on the table for each other.
#[derive(Default)]
struct Table {
    /// What each rank has put down in this round.
    down: Vec<Option<Arc<Vec<u8>>>>,
    /// How many ranks have yet to take what is on the table.
    takers: usize,
    /// Why the ranks cannot go on.
    broken: Option<String>,
}

struct Shared {
    table: Mutex<Table>,
    changed: Condvar,
}

/// One thread's place at the table. Once it is dropped, the others cannot go on.
struct Thread {
    rank: usize,
    size: usize,
    shared: Arc<Shared>,
}

impl Thread {
    fn all(size: usize) -> Vec<Arc<dyn Exchange>> {
        let table = Table { down: vec![None; size], ..Table::default() };
        let shared = Arc::new(Shared { table: Mutex::new(table), changed: Condvar::new() });
        (0..size).map(|rank| Arc::new(Thread { rank, size, shared: shared.clone() }) as Arc<dyn Exchange>).collect()
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.shared.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&'a self, mut table: MutexGuard<'a, Table>, until: impl Fn(&Table) -> bool) -> Result<MutexGuard<'a, Table>, Error> {
        while !until(&table) {
            if let Some(why) = &table.broken {
                return Err(Error::Ranks(why.clone()));
            }
            table = self.shared.changed.wait(table).unwrap_or_else(PoisonError::into_inner);
        }
        Ok(table)
    }

    /// What every rank has sent.
    fn exchange(&self, send: &[u8]) -> Result<Vec<Arc<Vec<u8>>>, Error> {
        let mut table = self.wait(self.table(), |t| t.takers == 0)?;
        table.down[self.rank] = Some(Arc::new(send.to_vec()));
        if table.down.iter().all(Option::is_some) {
            table.takers = self.size;
            self.shared.changed.notify_all();
        }
        let mut table = self.wait(table, |t| t.takers > 0)?;
        let all: Vec<Arc<Vec<u8>>> = table.down.iter().flatten().cloned().collect();
        let wrong = all.iter().any(|other| other.len() != send.len());
        table.takers -= 1;
        if table.takers == 0 {
            table.down.fill(None);
            self.shared.changed.notify_all();
        }
        match wrong {
            true => Err(Error::Ranks("the ranks exchange values of different sizes: they run different programs".into())),
            false => Ok(all),
        }
    }
}

impl Drop for Thread {
    fn drop(&mut self) {
        let mut table = self.table();
        table.broken.get_or_insert(format!("rank {} has ended", self.rank));
        self.shared.changed.notify_all();
    }
}

impl Exchange for Thread {
    fn all_gather(&self, send: &[u8], receive: &mut [u8]) -> Result<(), Error> {
        let all = self.exchange(send)?;
        receive.chunks_mut(send.len().max(1)).zip(&all).for_each(|(to, from)| to.copy_from_slice(from));
        Ok(())
    }

    fn all_to_all(&self, send: &[u8], receive: &mut [u8]) -> Result<(), Error> {
        let part = send.len() / self.size;
        let all = self.exchange(send)?;
        receive.chunks_mut(part.max(1)).zip(&all).for_each(|(to, from)| to.copy_from_slice(&from[self.rank * part..][..part]));
        Ok(())
    }
}

/// `data` times `tensor` ranks, each to be handed to a thread of its own.
pub fn ranks(data: usize, tensor: usize) -> Vec<Ranks> {
    let by_data: Vec<Vec<_>> = (0..tensor).map(|_| Thread::all(data)).collect();
    let by_tensor: Vec<Vec<_>> = (0..data).map(|_| Thread::all(tensor)).collect();
    let both = (0..data).flat_map(|d| (0..tensor).map(move |t| (d, t)));
    let groups =
        |d: usize, t: usize| [Group::new("data", d, data, by_data[t][d].clone()), Group::new("tensor", t, tensor, by_tensor[d][t].clone())];
    both.map(|(d, t)| groups(d, t)).map(|[data, tensor]| Ranks::new(data, tensor)).collect()
}

/// Calls `f` on a thread for each of `data` times `tensor` ranks, and returns what each found.
pub fn each<R: Send>(data: usize, tensor: usize, f: impl Fn(Ranks) -> R + Sync) -> Vec<R> {
    let f = &f;
    std::thread::scope(|s| {
        let threads: Vec<_> = ranks(data, tensor).into_iter().map(|ranks| s.spawn(move || f(ranks))).collect();
        threads.into_iter().map(|t| t.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn on_all<R: Send>(size: usize, f: impl Fn(&Group) -> R + Sync) -> Vec<R> {
        each(size, 1, |r| f(&r.data))
    }

    /// Of sizes that divide among the ranks and of others, again and again.
    #[test]
    fn sums_are_those_of_all_ranks_in_their_order() {
        for (size, n) in [(2, 8), (4, 7), (3, 1), (1, 5)] {
            let number = |rank: usize, i: usize, round: usize| (1 + rank * 31 + i * 7 + round) as f32 / 3.0;
            let found = on_all(size, |g| {
                (0..20)
                    .map(|round| {
                        let mut x: Vec<f32> = (0..n).map(|i| number(g.rank, i, round)).collect();
                        g.all_reduce(&mut x);
                        x
                    })
                    .collect::<Vec<_>>()
            });
            for (round, x) in found[0].iter().enumerate() {
                let sums: Vec<f32> = (0..n).map(|i| (1..size).fold(number(0, i, round), |s, r| s + number(r, i, round))).collect();
                assert_eq!(*x, sums, "{size} ranks, round {round}");
            }
            assert!(found.iter().all(|x| *x == found[0]));
        }
    }

    #[test]
    fn parts_go_to_their_ranks_and_bytes_keep_their_lengths() {
        let found = on_all(3, |g| {
            let x: Vec<i32> = (0..6).map(|i| (10 * g.rank + i) as i32).collect();
            let mut y = vec![0; 6];
            g.all_to_all(&x, &mut y);
            (y, g.gather_bytes(&vec![g.rank as u8; g.rank]).unwrap())
        });
        assert_eq!(found[1].0, [2, 3, 12, 13, 22, 23]);
        assert!(found.iter().all(|f| f.1 == [vec![], vec![1], vec![2, 2]]));
    }

    #[test]
    fn a_rank_that_ends_ends_the_others() {
        let ended = on_all(3, |g| if g.rank == 1 { None } else { Some(g.wait().unwrap_err().to_string()) });
        assert!(ended[0].as_ref().unwrap().contains("rank 1 has ended"), "{ended:?}");
    }
}
