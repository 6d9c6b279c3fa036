//! Tests of placement: single rules, and clusters that proptest makes.

use proptest::prelude::*;

use super::*;

const NOW: i64 = 1_785_000_000_000_000;

fn node(n: usize) -> NodeId {
    format!("00000000-0000-4000-8000-{n:012x}").parse().expect("an id")
}

fn layer(n: u8) -> LayerId {
    LayerId::from_hash(&[n; 32])
}

/// A host with as many places, half of whose memory is free.
fn report(running: u32, max: u32) -> Report {
    Report {
        memory_bytes: 8 << 30,
        left: Some(HostCapacity {
            memory_available_bytes: 4 << 30,
            disk_available_bytes: 100 << 30,
        }),
        cores: 8,
        running,
        bounds: Bounds {
            max_sandboxes: Some(max),
            ..Bounds::default()
        },
        ..Report::default()
    }
}

fn nodes(reports: impl IntoIterator<Item = Report>) -> Nodes {
    let mut nodes = Nodes::default();
    for (n, report) in reports.into_iter().enumerate() {
        nodes.report(&node(n), report, NOW);
    }
    nodes
}

/// Numbers that look random, the same for each seed.
fn chance(seed: u64) -> impl FnMut(usize) -> usize {
    let mut state = seed;
    move |below| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(state >> 33).unwrap_or(0) % below.max(1)
    }
}

fn order(nodes: &Nodes, need: &Need<'_>, now_us: i64) -> Vec<NodeId> {
    nodes.candidates(need, now_us, &mut chance(1))
}

#[test]
fn the_least_loaded_of_few_comes_first_whatever_their_sizes() {
    let known = nodes([report(90, 100), report(3, 10), report(600, 1000)]);
    assert_eq!(
        order(&known, &Need::default(), NOW),
        [node(1), node(2), node(0)],
        "the memory is the same: half of it"
    );
}

#[test]
fn a_node_that_drains_lacks_a_feature_or_is_full_is_no_candidate() {
    let draining = Report {
        is_draining: true,
        ..report(0, 10)
    };
    let able = Report {
        features: BTreeSet::from(["checkpoints".to_owned()]),
        ..report(9, 10)
    };
    let short = Report {
        bounds: Bounds {
            memory_floor_mb: 5000,
            ..Bounds::default()
        },
        ..report(0, 10)
    };
    let known = nodes([draining, report(0, 10), report(10, 10), able, short]);
    let need = Need {
        features: &["checkpoints"],
        ..Need::default()
    };
    assert_eq!(order(&known, &need, NOW), [node(3)]);
    assert_eq!(order(&known, &Need::default(), NOW), [node(1), node(3)]);
    // What it said of its room may not be true any more, but that it drains is not forgotten.
    let later = order(&known, &Need::default(), NOW + OLD_US);
    assert_eq!(later.len(), 4);
    assert!(!later.contains(&node(0)), "{later:?}");
}

#[test]
fn a_drain_counts_before_the_next_report() {
    let mut known = nodes([report(0, 10), report(9, 10)]);
    let room = known.room(&Need::default(), NOW);
    known.drain(&node(0), true);
    assert_eq!(order(&known, &Need::default(), NOW), [node(1)]);
    assert!(known.room(&Need::default(), NOW) > (0, room.1));
    assert_eq!(known.room(&Need::default(), NOW).0, 1);
    known.drain(&node(1), true);
    assert!(order(&known, &Need::default(), NOW).is_empty());
    assert_eq!(known.room(&Need::default(), NOW).0, 0);
    known.drain(&node(0), false);
    assert_eq!(order(&known, &Need::default(), NOW), [node(0)]);
    // There is none of this name.
    known.drain(&node(7), true);
}

#[test]
fn own_requests_count_until_the_next_report() {
    let mut known = nodes([report(0, 4), report(2, 4)]);
    for _ in 0..3 {
        known.begin(&node(0));
    }
    known.finish(&node(0), Outcome::Placed, NOW);
    assert_eq!(order(&known, &Need::default(), NOW)[0], node(1));
    known.report(&node(0), report(0, 4), NOW + 1);
    for _ in 0..2 {
        known.finish(&node(0), Outcome::Failed, NOW);
    }
    assert_eq!(order(&known, &Need::default(), NOW + 1)[0], node(0));
}

#[test]
fn a_node_that_refuses_is_left_alone_for_longer_each_time() {
    let mut known = nodes([report(0, 10)]);
    let mut now_us = NOW;
    for pause_s in [1, 2, 4, 8, 16, 32, 60, 60] {
        known.begin(&node(0));
        known.finish(&node(0), Outcome::Refused, now_us);
        let end_us = now_us + pause_s * 1_000_000;
        assert!(order(&known, &Need::default(), end_us - 1).is_empty());
        assert_eq!(order(&known, &Need::default(), end_us), [node(0)]);
        now_us = end_us;
    }
    known.finish(&node(0), Outcome::Refused, now_us);
    known.report(&node(0), report(0, 10), now_us);
    assert!(order(&known, &Need::default(), now_us).is_empty(), "whatever it says");
    known.finish(&node(0), Outcome::Placed, now_us);
    known.report(&node(0), report(0, 10), now_us + 60_000_000);
    let now_us = now_us + 60_000_000;
    known.finish(&node(0), Outcome::Refused, now_us);
    assert!(order(&known, &Need::default(), now_us).is_empty());
    known.report(&node(0), report(0, 10), now_us + 1);
    let found = order(&known, &Need::default(), now_us + 1);
    assert_eq!(found, [node(0)], "once, and it has spoken since");
}

#[test]
fn silent_nodes_come_last() {
    let mut known = nodes([report(0, 10), report(9, 10)]);
    known.report(&node(1), report(9, 10), NOW + OLD_US);
    assert_eq!(order(&known, &Need::default(), NOW + OLD_US), [node(1), node(0)]);
    // Also one whose time is that of a clock that was set back since.
    assert_eq!(order(&known, &Need::default(), NOW - 1), [node(0), node(1)]);
}

#[test]
fn a_node_that_has_the_layers_is_better_than_one_that_is_a_little_less_loaded() {
    let has = Report {
        layers: HashSet::from([layer(1), layer(2)]),
        ..report(60, 100)
    };
    let need = |layers| Need {
        layers,
        ..Need::default()
    };
    let layers = [layer(1), layer(2)];
    let known = nodes([has.clone(), report(51, 100)]);
    assert_eq!(order(&known, &need(&layers), NOW), [node(0), node(1)]);
    let more = Report { running: 75, ..has };
    let known = nodes([more, report(51, 100)]);
    assert_eq!(order(&known, &need(&layers), NOW), [node(1), node(0)]);
}

#[test]
fn the_last_place_of_many_nodes_is_found() {
    let known = nodes((0..1000).map(|n| report(if n == 777 { 9 } else { 10 }, 10)));
    for seed in 0..20 {
        let found = known.candidates(&Need::default(), NOW, &mut chance(seed));
        assert_eq!(found, [node(777)]);
    }
}

#[test]
fn requests_of_servers_that_know_the_same_are_spread() {
    let known = nodes((0..100).map(|_| report(0, 10)));
    let firsts: BTreeSet<NodeId> = (0..100)
        .map(|seed| {
            known
                .candidates(&Need::default(), NOW, &mut chance(seed))
                .swap_remove(0)
        })
        .collect();
    assert!(firsts.len() > 40, "{} nodes", firsts.len());
}

fn any_report() -> impl Strategy<Value = Report> {
    let sizes = (any::<u64>(), any::<u64>(), any::<u64>(), any::<u32>());
    let counts = (any::<u32>(), any::<u32>(), proptest::option::of(any::<u32>()));
    (sizes, counts, 0..=100u8, any::<bool>(), any::<bool>()).prop_map(
        |((memory, free, disk, cores), (running, starting, max), pressure, is_draining, tells)| Report {
            memory_bytes: memory,
            left: tells.then_some(HostCapacity {
                memory_available_bytes: free,
                disk_available_bytes: disk,
            }),
            cores,
            running,
            starting,
            pressure,
            bounds: Bounds {
                max_sandboxes: max,
                ..Bounds::default()
            },
            is_draining,
            ..Report::default()
        },
    )
}

proptest! {
    /// Whatever nodes say, candidates are known, different, few, and none of them drains; and where a node certainly has room,
    /// there is a candidate.
    #[test]
    fn candidates_are_few_and_none_drains(
        reports in proptest::collection::vec((any_report(), any::<i64>()), 0..30),
        memory_mb in any::<u32>(),
        now_us in any::<i64>(),
        seed in any::<u64>(),
    ) {
        let mut known = Nodes::default();
        for (n, (report, at_us)) in reports.iter().enumerate() {
            known.report(&node(n), report.clone(), *at_us);
        }
        let need = Need { memory_mb, ..Need::default() };
        let found = known.candidates(&need, now_us, &mut chance(seed));
        prop_assert!(found.len() <= CANDIDATES);
        prop_assert_eq!(found.iter().collect::<BTreeSet<_>>().len(), found.len());
        for (n, (report, _)) in reports.iter().enumerate() {
            prop_assert!(!report.is_draining || !found.contains(&node(n)));
            let has_room = !report.is_draining
                && report.bounds.max_sandboxes.is_none_or(|max| u64::from(report.running) + u64::from(report.starting) < u64::from(max));
            prop_assert!(!has_room || !found.is_empty());
        }
    }

    /// One node that always refuses costs each request one try at most, and no request is refused that another node has room for.
    #[test]
    fn one_that_always_refuses_hinders_nobody(places in proptest::collection::vec(1..20u32, 1..10), seed in any::<u64>()) {
        // Node 0 says that it is empty and refuses; the others give out as many places as they have.
        let mut known = nodes([report(0, 1000)].into_iter().chain(places.iter().map(|max| report(0, *max))));
        let mut left: Vec<u32> = [0].into_iter().chain(places.iter().copied()).collect();
        let mut random = chance(seed);
        let mut tries = 0;
        let total: u32 = places.iter().sum();
        for request in 0..total {
            let now_us = NOW + i64::from(request) * 1000;
            let placed = known.candidates(&Need::default(), now_us, &mut random).into_iter().any(|id| {
                tries += 1;
                let n = (0..left.len()).find(|n| node(*n) == id).expect("a node");
                known.begin(&id);
                let fits = left[n] > 0;
                left[n] -= u32::from(fits);
                known.finish(&id, if fits { Outcome::Placed } else { Outcome::Refused }, now_us);
                fits
            });
            prop_assert!(placed, "request {} of {}", request, total);
        }
        prop_assert!(tries <= total + 2, "{} tries for {} requests", tries, total);
    }
}
