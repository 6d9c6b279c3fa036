//! Fairness between streams: a task yields after its stream has moved a number of bytes.
//!
//! A stream that is always ready, such as one from a server that sends without end, would be read and parsed without a
//! break. The cooperative budget of the runtime counts reads, and one read may return hundreds of kilobytes of data that
//! is expensive to parse: heads, small frames. So streams count bytes, and when the budget is used up the task goes to the
//! back of the run queue.

use std::task::{Context, Poll};

/// The budget in bytes. Parsing this much takes at most about a millisecond; copying it as file data takes less than
/// going to the back of an empty queue.
const TURN_BYTES: usize = 32 * 1024;
/// Minimum charge per call, which costs as much as copying this many bytes.
const CALL_BYTES: usize = 256;

/// The budget of one stream.
#[derive(Debug)]
pub(super) struct ByteBudget {
    left: usize,
}

impl ByteBudget {
    pub(super) fn new() -> Self {
        Self { left: TURN_BYTES }
    }

    /// Runs `call`, unless the budget is used up: then the task is rescheduled behind all other ready tasks. `call`
    /// returns how many bytes it moved.
    pub(super) fn poll<T, E>(
        &mut self,
        cx: &mut Context<'_>,
        call: impl FnOnce(&mut Context<'_>) -> Poll<Result<(T, usize), E>>,
    ) -> Poll<Result<T, E>> {
        if self.left == 0 {
            self.left = TURN_BYTES;
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        match call(cx) {
            Poll::Ready(Ok((value, bytes))) => {
                self.left = self.left.saturating_sub(bytes.max(CALL_BYTES));
                Poll::Ready(Ok(value))
            }
            Poll::Ready(Err(error)) => Poll::Ready(Err(error)),
            // The task waits for I/O now, so it starts with a new budget.
            Poll::Pending => {
                self.left = TURN_BYTES;
                Poll::Pending
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::{Wake, Waker};

    use super::*;

    #[derive(Default)]
    struct Wakes(AtomicUsize);

    impl Wake for Wakes {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// Calls until the budget is used up; returns the number of calls.
    fn calls(budget: &mut ByteBudget, cx: &mut Context<'_>, bytes: usize) -> usize {
        let mut made = 0;
        while budget
            .poll(cx, |_| Poll::Ready(Ok::<_, Infallible>(((), bytes))))
            .is_ready()
        {
            made += 1;
            assert!(made < 10_000, "a budget without end");
        }
        made
    }

    #[test]
    fn a_stream_that_is_always_ready_gives_way_and_goes_on() {
        let wakes = Arc::new(Wakes::default());
        let waker = Waker::from(Arc::clone(&wakes));
        let mut cx = Context::from_waker(&waker);
        let mut budget = ByteBudget::new();
        for (round, (bytes, most)) in [(1, 128), (TURN_BYTES / 4, 4), (10 * TURN_BYTES, 1), (0, 128)]
            .into_iter()
            .enumerate()
        {
            assert_eq!(calls(&mut budget, &mut cx, bytes), most, "{bytes}");
            assert_eq!(wakes.0.load(Ordering::SeqCst), round + 1, "it is woken again");
        }
    }

    #[test]
    fn one_that_has_to_wait_begins_a_new_turn() {
        let mut cx = Context::from_waker(Waker::noop());
        let mut budget = ByteBudget::new();
        let mut ready = |budget: &mut ByteBudget| {
            budget
                .poll(&mut cx, |_| Poll::Ready(Ok::<_, Infallible>(((), TURN_BYTES - 1))))
                .is_ready()
        };
        assert!(ready(&mut budget));
        let mut cx = Context::from_waker(Waker::noop());
        assert!(
            budget
                .poll(&mut cx, |_| Poll::<Result<((), usize), Infallible>>::Pending)
                .is_pending()
        );
        let mut cx = Context::from_waker(Waker::noop());
        let again = budget.poll(&mut cx, |_| Poll::Ready(Ok::<_, Infallible>(((), TURN_BYTES - 1))));
        assert!(again.is_ready());
        assert_eq!(calls(&mut budget, &mut cx, 1), 1);
    }
}
