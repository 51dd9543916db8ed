//! A thread that keeps batches ready.

use std::any::Any;
use std::cell::Cell;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::{DataError, Order, Source};

/// `ids` and `targets` are `[batch, seq]`, row-major; so is `until`, where items have it.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Batch {
    pub ids: Vec<i32>,
    pub targets: Vec<i32>,
    pub until: Vec<i32>,
    /// Targets that are not -1.
    pub counted: usize,
    /// Place of the first row in the order; start a loader there to get this batch again.
    pub first_item: u64,
}

thread_local! {
    static WAITED: Cell<Duration> = const { Cell::new(Duration::ZERO) };
}

/// Batch b holds the items at places `start_item + b * batch` and on, of the order, or of the source repeated for ever.
pub struct Loader {
    /// None only while dropping.
    batches: Option<Receiver<Result<Batch, DataError>>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Loader {
    pub fn new(source: Arc<dyn Source>, order: Option<Order>, batch: usize, start_item: u64, ahead: usize) -> Result<Self, DataError> {
        Loader::of_rows(source, order, (batch, 0..batch), start_item, ahead)
    }

    /// Makes only these rows of every batch, where the source says how many targets count in the others. Those are then ids of 0, and targets that do not count.
    pub fn of_rows(
        source: Arc<dyn Source>,
        order: Option<Order>,
        (batch, own): (usize, Range<usize>),
        start_item: u64,
        ahead: usize,
    ) -> Result<Self, DataError> {
        let wrong = |what, value: u64, need: String| DataError::Setting { what, value: value.to_string(), need };
        if batch == 0 {
            return Err(wrong("batch", 0, "a batch has at least one row".into()));
        }
        let len = source.len();
        if let Some(order) = order.filter(|order| !(1..=len).contains(&order.len)) {
            return Err(wrong("the length of the order", order.len, format!("the source has {len} items")));
        }
        let own = if source.counted().is_some() && !own.is_empty() { own } else { 0..batch };
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let (send, batches) = sync_channel(ahead);
        let work = move || {
            let mut first_item = start_item;
            while let Some(made) = make(&*source, order, first_item, (batch, &own), &stopped) {
                let failed = made.is_err();
                // Sending fails when the loader was dropped.
                if send.send(made).is_err() || failed {
                    return;
                }
                first_item += batch as u64;
            }
        };
        let thread = std::thread::Builder::new()
            .name("kiln-loader".into())
            .spawn(work)
            .map_err(|error| wrong("ahead", ahead as u64, format!("cannot start the loader's thread: {error} (end other programs)")))?;
        Ok(Loader { batches: Some(batches), stop, thread: Some(thread) })
    }

    /// How long this thread has waited for batches of any loader.
    pub fn waited() -> Duration {
        WAITED.get()
    }

    #[allow(clippy::should_implement_trait)] // It never ends, and `?` on each batch reads better.
    pub fn next(&mut self) -> Result<Batch, DataError> {
        let asked = Instant::now();
        let received = self.batches.as_ref().and_then(|batches| batches.recv().ok());
        WAITED.set(WAITED.get() + asked.elapsed());
        received.unwrap_or(Err(DataError::Stopped))
    }
}

impl Drop for Loader {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        // Wakes a thread that waits for room in the channel.
        self.batches = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// None when asked to stop.
fn make(
    source: &dyn Source,
    order: Option<Order>,
    first_item: u64,
    (batch, own): (usize, &Range<usize>),
    stop: &AtomicBool,
) -> Option<Result<Batch, DataError>> {
    let mut made = Batch { first_item, ..Batch::default() };
    for row in own.clone() {
        if stop.load(Ordering::Relaxed) {
            return None;
        }
        let place = first_item + row as u64;
        let index = order.map_or_else(|| place % source.len(), |order| order.at(place));
        let item = catch_unwind(AssertUnwindSafe(|| source.item(index)))
            .unwrap_or_else(|panic| Err(DataError::Panicked { item: index, message: message(&*panic) }));
        match item {
            Ok(item) => {
                made.ids.extend(item.ids);
                made.targets.extend(item.targets);
                made.until.extend(item.until);
            }
            Err(error) => return Some(Err(error)),
        }
    }
    made.counted = made.targets.iter().filter(|&&target| target >= 0).count();
    if let Some(counted) = source.counted().filter(|_| own.len() < batch) {
        made.counted = counted * batch;
        // All items are of one length.
        let around = |rows: &mut Vec<i32>, other: i32| {
            let row = rows.len() / own.len();
            rows.splice(..0, std::iter::repeat_n(other, row * own.start));
            rows.resize(row * batch, other);
        };
        around(&mut made.ids, 0);
        around(&mut made.targets, -1);
        around(&mut made.until, 0);
    }
    Some(Ok(made))
}

fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| text.to_string());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".into())
}

#[cfg(test)]
mod tests {
    use super::super::Item;
    use super::*;
    use std::sync::atomic::AtomicU64;

    /// Item i is [i, i]; `bad` fails, `bad + 1` panics.
    #[derive(Default)]
    struct Numbers {
        len: u64,
        bad: Option<u64>,
        made: AtomicU64,
        counted: Option<usize>,
    }

    impl Source for Numbers {
        fn len(&self) -> u64 {
            self.len
        }
        fn item(&self, i: u64) -> Result<Item, DataError> {
            self.made.fetch_add(1, Ordering::Relaxed);
            match self.bad {
                Some(bad) if i == bad => return Err(DataError::OutOfRange { item: i, len: bad }),
                Some(bad) if i == bad + 1 => panic!("no number {i}"),
                _ => {}
            }
            let i = i as i32;
            Ok(Item { ids: vec![i; 2], targets: vec![-1, i], ..Item::default() })
        }
        fn counted(&self) -> Option<usize> {
            self.counted
        }
        fn entropy_floor(&self) -> Option<f64> {
            None
        }
    }

    fn numbers(len: u64, bad: Option<u64>) -> Arc<Numbers> {
        Arc::new(Numbers { len, bad, ..Numbers::default() })
    }

    fn first(n: usize, order: Option<Order>, start: u64, ahead: usize) -> Vec<Batch> {
        let mut loader = Loader::new(numbers(10, None), order, 3, start, ahead).unwrap();
        (0..n).map(|_| loader.next().unwrap()).collect()
    }

    #[test]
    fn batches_follow_the_order_whatever_is_ahead_and_wherever_it_starts() {
        let sequential = first(4, None, 0, 2);
        assert_eq!(sequential[3].ids, [9, 9, 0, 0, 1, 1], "the source repeats");
        assert_eq!(sequential[1].targets, [-1, 3, -1, 4, -1, 5]);
        assert_eq!((sequential[1].counted, sequential[1].first_item), (3, 3));

        let order = Order { seed: 4, len: 10 };
        for order in [None, Some(order)] {
            let all = first(12, order, 0, 0);
            for ahead in [1, 2, 50] {
                assert_eq!(all, first(12, order, 0, ahead));
            }
            assert_eq!(all[5..], first(7, order, all[5].first_item, 2));
        }
        let mut epoch: Vec<i32> = first(10, Some(order), 0, 1).iter().flat_map(|b| b.ids.clone()).collect();
        epoch.truncate(20);
        epoch.sort();
        assert_eq!(epoch, (0..10).flat_map(|i| [i, i]).collect::<Vec<_>>());
    }

    /// Four ranks make every item once, and each what all of them make together.
    #[test]
    fn ranks_make_their_own_rows() {
        let order = Some(Order { seed: 4, len: 10 });
        let source = |counted| Arc::new(Numbers { len: 10, counted, ..Numbers::default() });
        let batches = |source: Arc<Numbers>, own: Range<usize>| {
            let mut loader = Loader::of_rows(source, order, (8, own), 16, 0).unwrap();
            (0..5).map(|_| loader.next().unwrap()).collect::<Vec<_>>()
        };
        let whole = batches(source(None), 0..8);
        for rank in 0..4 {
            let own = 2 * rank..2 * rank + 2;
            let made = source(Some(1));
            for (ours, all) in batches(made.clone(), own.clone()).iter().zip(&whole) {
                assert_eq!((ours.ids.len(), ours.targets.len(), ours.counted, ours.first_item), (16, 16, all.counted, all.first_item));
                let rows = 2 * own.start..2 * own.end;
                assert_eq!((&ours.ids[rows.clone()], &ours.targets[rows.clone()]), (&all.ids[rows.clone()], &all.targets[rows.clone()]));
                let others = (0..16).filter(|i| !rows.contains(i));
                assert!(others.into_iter().all(|i| ours.ids[i] == 0 && ours.targets[i] == -1));
            }
            // The thread may be a batch or two ahead.
            assert!(made.made.load(Ordering::Relaxed) <= 2 * 7);
            // Where items differ, how many targets count is in all rows.
            assert_eq!(batches(source(None), own), whole);
        }
    }

    #[test]
    fn errors_and_panics_arrive() {
        for (start, part) in [(0, "item 4 does not exist"), (5, "panicked at item 5: no number 5")] {
            let mut loader = Loader::new(numbers(10, Some(4)), None, 2, start, 3).unwrap();
            let error = loop {
                if let Err(error) = loader.next() {
                    break error.to_string();
                }
            };
            assert!(error.contains(part), "{error}");
            assert!(matches!(loader.next(), Err(DataError::Stopped)));
        }
        assert!(Loader::new(numbers(10, None), None, 0, 0, 1).is_err());
        assert!(Loader::new(numbers(10, None), Some(Order { seed: 0, len: 11 }), 1, 0, 1).is_err());
    }

    #[test]
    fn dropping_stops_the_thread() {
        let source = numbers(1 << 30, None);
        // A batch that would take minutes: the thread must stop inside it.
        let loader = Loader::new(source.clone(), None, 1 << 30, 0, 2).unwrap();
        while source.made.load(Ordering::Relaxed) == 0 {
            std::thread::yield_now();
        }
        drop(loader);
        assert_eq!(Arc::strong_count(&source), 1, "the thread has ended");
        assert!(source.made.load(Ordering::Relaxed) < 1 << 29);

        let source = numbers(10, None);
        drop(Loader::new(source.clone(), None, 2, 0, 1).unwrap());
        assert_eq!(Arc::strong_count(&source), 1);
    }
}
