//! The store on both engines: one suite, and the engine is a parameter.
//!
//! PostgreSQL is a real server that the suite starts in a temporary directory. Without its program the suite fails: a
//! suite that skips an engine proves nothing about it.

#![expect(
    clippy::disallowed_methods,
    clippy::unwrap_used,
    reason = "in a test an error is a failure, and where it happened is what matters; it starts a server, and clients"
)]

mod access;
mod concurrency;
mod database;
mod idempotency;
mod lists;
mod nodes;
mod opening;
mod postgres;
mod records;
mod samples;
mod sandboxes;
mod templates;
mod tokens;

use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;

use crate::database::{Database, Databases};

type Case = fn(Database) -> Pin<Box<dyn Future<Output = ()>>>;

macro_rules! cases {
    ($($module:ident :: $name:ident),* $(,)?) => {
        &[$((concat!(stringify!($module), "::", stringify!($name)), |db| Box::pin($module::$name(db)))),*]
    };
}

const CASES: &[(&str, Case)] = cases![
    access::teams_and_users,
    access::api_keys,
    access::access_keys,
    access::api_keys_are_managed_within_their_team,
    access::text_that_one_engine_refuses,
    tokens::a_life,
    tokens::uses_are_noted_forwards,
    idempotency::a_life,
    idempotency::one_of_many_claims_wins,
    idempotency::expired_claims_are_free,
    idempotency::late_owners_change_nothing,
    templates::names_are_resolved_in_scope_order,
    templates::a_taken_alias_leaves_no_template,
    templates::spawns_are_counted,
    templates::builds_are_told_newest_first,
    templates::the_newest_ready_build_counts,
    sandboxes::every_field_comes_back,
    sandboxes::a_life,
    sandboxes::changes_from_an_old_view_are_stale,
    sandboxes::ends_move_only_while_running,
    sandboxes::corrupt_rows_are_named,
    lists::pages_follow_each_other_in_both_orders,
    lists::filters_are_all_applied,
    lists::metadata_is_matched_over_many_rows,
    lists::labels_of_any_text_are_matched_exactly,
    lists::pages_stay_in_place_while_sandboxes_come_and_go,
    lists::live_sandboxes_of_every_team,
    nodes::a_lease_has_one_owner,
    nodes::one_of_many_takes_a_lease,
    nodes::rows_are_changed_by_their_own_node,
    nodes::keys_in_progress_are_of_their_node,
    records::entries_come_back_as_asked,
    records::teams_read_their_own,
    records::a_batch_written_twice_is_there_once,
    records::logs_are_cut_at_their_old_end,
    records::logs_age_from_the_end_of_their_sandbox,
    records::the_logs_of_those_that_ended_first_are_evicted,
    records::metrics_are_found_by_overlap_and_age_alone,
    concurrency::one_writer_wins_each_version,
    concurrency::extensions_never_shorten,
    concurrency::two_processes_write_at_once,
    concurrency::abandoned_changes_leave_no_lock,
    concurrency::a_connection_that_is_cut_in_a_transaction_is_replaced,
    opening::many_open_a_new_database_at_once,
    opening::a_second_migration_changes_nothing,
    opening::a_newer_schema_is_refused,
    opening::an_older_schema_is_migrated,
    opening::rows_of_no_node_are_taken_by_the_first,
    opening::rows_survive_a_drop_without_close,
    opening::columns_are_text_or_bigint,
];

#[test]
fn suite_on_sqlite() {
    suite(&Databases::sqlite());
}

#[test]
fn suite_on_postgres() {
    suite(&Databases::postgres());
}

/// Runs every case on a database of its own, all of them even when some fail.
fn suite(databases: &Databases) {
    let mut failed = Vec::new();
    for (name, case) in CASES {
        let run = AssertUnwindSafe(|| {
            let runtime = tokio::runtime::Builder::new_multi_thread()
                .worker_threads(2)
                .enable_all()
                .build()
                .unwrap();
            runtime.block_on(async { case(databases.create().await).await });
        });
        if catch_unwind(run).is_err() {
            failed.push(*name);
        }
    }
    assert!(failed.is_empty(), "failed cases: {failed:?}");
}
