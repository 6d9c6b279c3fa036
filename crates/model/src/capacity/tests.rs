//! Tests of permits: tables of single cases, and sequences that proptest makes.

use std::collections::HashSet;

use proptest::prelude::*;

use super::*;

fn id(n: u8) -> SandboxId {
    format!("i{n}").parse().expect("an id")
}

fn request(n: u8, number: u64) -> PermitRequest {
    PermitRequest {
        id: id(n),
        number,
        purpose: Purpose::Wanted,
        bounds: Bounds::default(),
        reads_again: false,
    }
}

fn at_most(max: u32) -> Bounds {
    Bounds {
        max_sandboxes: Some(max),
        ..Bounds::default()
    }
}

#[test]
fn bounds_of_both_sides_hold() {
    let one = Bounds {
        memory_floor_mb: 1,
        disk_floor_mb: 20,
        disk_per_sandbox_mb: 3,
        max_sandboxes: None,
    };
    let other = Bounds {
        memory_floor_mb: 10,
        disk_floor_mb: 2,
        disk_per_sandbox_mb: 0,
        max_sandboxes: Some(5),
    };
    let both = Bounds {
        memory_floor_mb: 10,
        disk_floor_mb: 20,
        disk_per_sandbox_mb: 3,
        max_sandboxes: Some(5),
    };
    assert_eq!((one.and(other), other.and(one)), (both, both));
    assert_eq!(at_most(3).and(at_most(4)).max_sandboxes, Some(3));
}

#[test]
fn a_permit_is_counted_until_it_is_given_back_or_ends() {
    let (mut permits, none) = (Permits::default(), HashSet::new());
    let own = at_most(1);
    permits.take(&request(1, 7), own, 0, &none).expect("the first");
    assert_eq!(permits.take(&request(2, 8), own, 1, &none), Err(NoCapacity::Count(1)));
    // One with another number, for example of an attempt before, changes nothing.
    permits.give_back(&id(1), 6);
    assert_eq!(permits.take(&request(2, 8), own, 2, &none), Err(NoCapacity::Count(1)));
    permits.give_back(&id(1), 7);
    permits.take(&request(2, 8), own, 3, &none).expect("it was given back");
    let end_us = 3 + PERMIT_US;
    assert_eq!(
        permits.take(&request(3, 9), own, end_us - 1, &none),
        Err(NoCapacity::Count(1))
    );
    permits.take(&request(3, 9), own, end_us, &none).expect("it has ended");
    assert_eq!(permits.count(end_us, &none), 1);
}

#[test]
fn what_is_being_started_does_not_end_and_is_a_permit_again_when_that_fails() {
    let (mut permits, mut present) = (Permits::default(), HashSet::new());
    let own = at_most(1);
    permits.take(&request(1, 7), own, 0, &present).expect("the first");
    permits.begin(&id(1), own, 1, &present).expect("it has a permit");
    let late_us = 10 * PERMIT_US;
    permits.give_back(&id(1), 7);
    assert_eq!(permits.count(late_us, &present), 1, "it is being started");
    permits.settle(&id(1), late_us, &present);
    assert_eq!(permits.count(late_us + 1, &present), 1, "for another attempt");
    permits.begin(&id(1), own, late_us + 2, &present).expect("that one");
    present.insert(id(1));
    assert_eq!(permits.count(late_us + 3, &present), 1, "not twice");
    permits.settle(&id(1), late_us + 3, &present);
    present.clear();
    assert_eq!(permits.count(late_us + 4, &present), 0, "the sandbox has ended");
}

#[test]
fn a_start_without_a_permit_needs_one() {
    let (mut permits, present) = (Permits::default(), HashSet::from([id(9)]));
    let refused = permits.begin(&id(1), at_most(1), 0, &present);
    assert_eq!(refused, Err(NoCapacity::Count(1)));
    permits.begin(&id(1), at_most(2), 0, &present).expect("one is left");
    assert_eq!(permits.count(0, &present), 2);
    permits.settle(&id(1), 1, &present);
    assert_eq!(permits.count(1, &present), 1, "nobody would give it back");
}

#[test]
fn limits_of_the_host_and_of_the_request_hold() {
    let (mut permits, none) = (Permits::default(), HashSet::new());
    let narrow = |n| PermitRequest {
        bounds: at_most(1),
        ..request(n, 1)
    };
    permits.take(&narrow(1), at_most(2), 0, &none).expect("the first");
    let refused = permits.take(&narrow(2), at_most(2), 0, &none);
    assert_eq!(refused, Err(NoCapacity::Count(1)));
    permits.take(&request(2, 1), at_most(2), 0, &none).expect("the second");
    let refused = permits.take(&request(3, 1), at_most(2), 0, &none);
    assert_eq!(refused, Err(NoCapacity::Count(2)));
}

#[test]
fn floors_are_exact() {
    let own = Bounds {
        memory_floor_mb: 100,
        disk_floor_mb: 200,
        ..Bounds::default()
    };
    for (memory, disk, expected) in [
        (100 * MIB, 200 * MIB, Ok(())),
        (
            100 * MIB - 1,
            200 * MIB,
            Err(NoCapacity::Memory {
                available_mb: 99,
                floor_mb: 100,
            }),
        ),
        (
            100 * MIB,
            200 * MIB - 1,
            Err(NoCapacity::Disk {
                available_mb: 199,
                floor_mb: 200,
            }),
        ),
    ] {
        let (mut permits, none) = (Permits::default(), HashSet::new());
        permits.end_reading(0, Some(left(memory, disk)));
        permits.take(&request(1, 1), own, 0, &none).expect("no limit");
        assert_eq!(permits.judge(&request(1, 1), own), expected);
        assert_eq!(permits.count(0, &none), usize::from(expected.is_ok()));
    }
}

fn left(memory_available_bytes: u64, disk_available_bytes: u64) -> HostCapacity {
    HostCapacity {
        memory_available_bytes,
        disk_available_bytes,
    }
}

#[test]
fn a_host_that_cannot_tell_is_tried_but_not_for_what_nobody_waits_for() {
    let spare = |memory_bytes| PermitRequest {
        purpose: Purpose::Spare { memory_bytes },
        ..request(1, 1)
    };
    let own = Bounds {
        memory_floor_mb: 1,
        disk_floor_mb: 1,
        ..Bounds::default()
    };
    let mut permits = Permits::default();
    permits.end_reading(0, None);
    permits.judge(&request(1, 1), own).expect("it is tried");
    assert_eq!(permits.judge(&spare(0), own), Err(NoCapacity::NotSpare));
    permits.end_reading(0, Some(left(3 * MIB, 2 * MIB)));
    permits.judge(&spare(MIB), own).expect("twice the floors are left");
    assert_eq!(permits.judge(&spare(MIB + 1), own), Err(NoCapacity::NotSpare));
}

#[test]
fn preallocated_disks_count_until_a_reading_has_them() {
    let own = Bounds {
        disk_per_sandbox_mb: 100,
        ..Bounds::default()
    };
    let (mut permits, mut present) = (Permits::default(), HashSet::new());
    let admit = |permits: &mut Permits, n, present: &HashSet<SandboxId>| {
        permits.take(&request(n, 1), own, 0, present).expect("no limit");
        permits.judge(&request(n, 1), own).is_ok()
    };
    permits.begin_reading();
    permits.end_reading(0, Some(left(0, 300 * MIB)));
    assert!(admit(&mut permits, 1, &present) && admit(&mut permits, 2, &present));
    // The first is there when the next reading begins, the second is still being started.
    permits.begin(&id(1), own, 0, &present).expect("a permit");
    present.insert(id(1));
    permits.settle(&id(1), 0, &present);
    permits.begin_reading();
    permits.end_reading(0, Some(left(0, 200 * MIB)));
    assert!(admit(&mut permits, 3, &present), "its disk is left");
    assert!(!admit(&mut permits, 4, &present), "that of the second will not be");
}

#[test]
fn readings_get_old() {
    let mut permits = Permits::default();
    assert!(!permits.is_fresh(0));
    permits.end_reading(1000, None);
    let fresh = [999, 1000, 999 + FRESH_US, 1000 + FRESH_US].map(|now_us| permits.is_fresh(now_us));
    assert_eq!(fresh, [false, true, true, false]);
    permits.forget_reading();
    assert!(!permits.is_fresh(1000));
}

#[derive(Debug, Clone)]
enum Step {
    Take(u8, u64),
    GiveBack(u8, u64),
    Begin(u8),
    Settle(u8, bool),
    End(u8),
    Wait(i64),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        (0..12u8, 1..4u64).prop_map(|(n, number)| Step::Take(n, number)),
        (0..12u8, 1..4u64).prop_map(|(n, number)| Step::GiveBack(n, number)),
        (0..12u8).prop_map(Step::Begin),
        (0..12u8, any::<bool>()).prop_map(|(n, starts)| Step::Settle(n, starts)),
        (0..12u8).prop_map(Step::End),
        (0..PERMIT_US * 2).prop_map(Step::Wait),
    ];
    proptest::collection::vec(step, 0..200)
}

proptest! {
    /// Whatever is asked for in whatever order, there are never more sandboxes than the host may have, and when everything
    /// has ended, nothing is counted.
    #[test]
    fn there_are_never_too_many(steps in steps(), max in 0..6u32) {
        let (mut permits, mut present, mut begun) = (Permits::default(), HashSet::new(), HashSet::new());
        let (own, mut now_us) = (at_most(max), 0i64);
        for step in steps {
            match step {
                Step::Take(n, number) => {
                    let _ = permits.take(&request(n, number), own, now_us, &present);
                }
                Step::GiveBack(n, number) => permits.give_back(&id(n), number),
                Step::Begin(n) if !present.contains(&id(n)) => {
                    if permits.begin(&id(n), own, now_us, &present).is_ok() {
                        begun.insert(id(n));
                    }
                }
                Step::Settle(n, starts) if begun.remove(&id(n)) => {
                    if starts {
                        present.insert(id(n));
                    }
                    permits.settle(&id(n), now_us, &present);
                }
                Step::End(n) => drop(present.remove(&id(n))),
                Step::Wait(us) => now_us += us,
                Step::Begin(_) | Step::Settle(..) => {}
            }
            let count = permits.count(now_us, &present);
            prop_assert!(count <= max as usize, "{count} of {max}");
            prop_assert!(present.union(&begun).count() <= count, "what is there is counted");
        }
        for id in begun {
            permits.settle(&id, now_us, &present);
        }
        present.clear();
        prop_assert_eq!(permits.count(now_us + PERMIT_US, &present), 0);
    }
}
