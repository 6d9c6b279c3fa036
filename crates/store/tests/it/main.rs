//! The store on both engines: the same cases run on SQLite and on PostgreSQL.
//!
//! The suite starts a real PostgreSQL server in a temporary directory, and fails when PostgreSQL is not installed: a
//! suite that skips an engine proves nothing about it.

#![expect(
    clippy::disallowed_methods,
    clippy::unwrap_used,
    reason = "in a test an error is a failure, and its place is what matters; the suite starts a server and clients"
)]

mod access;
mod builds;
mod concurrency;
mod database;
mod events;
mod idempotency;
mod injection_rules;
mod joined_nodes;
mod left;
mod lists;
mod nodes;
mod opening;
mod parcels;
mod postgres;
mod records;
mod samples;
mod sandboxes;
mod secrets;
mod servers;
mod snapshots;
mod states;
mod tags;
mod templates;
mod tokens;
mod transfer;

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
    access::api_keys_can_only_be_changed_by_their_team,
    access::nul_characters_are_refused_on_both_engines,
    secrets::insert_find_change_and_delete,
    secrets::pages_cover_the_list,
    events::event_queries_apply_every_filter,
    events::webhooks_are_of_their_team,
    events::deliveries_are_claimed_once_and_bounded,
    events::usage_of_several_nodes_is_added_up,
    snapshots::names_builds_and_lists,
    snapshots::a_memory_is_that_of_the_node_that_made_it,
    tokens::insert_find_list_and_delete,
    tokens::the_latest_use_is_recorded,
    idempotency::claim_complete_and_abandon,
    idempotency::one_of_many_concurrent_claims_succeeds,
    idempotency::expired_claims_can_be_acquired_again,
    idempotency::former_owners_cannot_change_a_claim,
    templates::names_are_resolved_in_scope_order,
    templates::a_conflicting_alias_rolls_the_template_back,
    templates::started_sandboxes_are_counted,
    templates::builds_are_listed_newest_first,
    templates::the_newest_ready_build_is_found,
    builds::requests_name_tag_and_supersede,
    builds::builds_are_begun_once_and_ended_once,
    builds::builds_of_a_server_that_is_gone_are_begun_elsewhere,
    builds::builds_move_to_another_server,
    builds::tags_can_be_set_back,
    builds::tags_have_a_history,
    tags::tags_are_bounded,
    tags::a_build_is_cancelled_once,
    tags::removals_are_announced_once,
    builds::deleted_templates_keep_their_id,
    builds::logs_are_read_by_offset_and_time,
    builds::layers_are_referred_to_until_nothing_needs_them,
    builds::uploaded_files_are_counted_and_removed_unused,
    builds::namespaces_are_unique,
    sandboxes::every_field_round_trips,
    sandboxes::insert_start_stop_and_delete,
    sandboxes::changes_of_an_old_version_are_stale,
    sandboxes::environments_are_stored_apart,
    sandboxes::pauses_and_resumes_are_changes_of_one_version,
    states::states_change_as_the_model_says,
    states::settings_change_as_the_model_says,
    states::rows_are_deleted_in_every_state,
    sandboxes::deadlines_change_only_while_running,
    sandboxes::the_network_changes_only_while_running,
    sandboxes::errors_name_the_corrupt_column,
    lists::pages_cover_the_list_in_both_orders,
    lists::all_filters_are_applied,
    lists::metadata_is_matched_across_scans,
    lists::labels_with_special_characters_are_matched_exactly,
    lists::pages_are_stable_while_sandboxes_are_created_and_deleted,
    lists::live_sandboxes_of_every_team,
    joined_nodes::a_token_makes_one_node_once,
    joined_nodes::one_of_many_that_use_a_token_joins,
    joined_nodes::a_drain_lasts_until_it_is_ended,
    servers::a_sandbox_leads_to_the_server_of_its_node,
    transfer::a_node_leaves_its_builds_to_a_server,
    servers::the_time_of_leases_is_that_of_the_database,
    servers::servers_that_are_gone_are_forgotten,
    servers::a_stopped_server_says_nothing,
    servers::a_lease_that_was_acquired_meanwhile_is_not_taken,
    servers::a_server_that_is_stopped_in_a_transaction_holds_up_no_other,
    servers::limits_hold_for_all_that_insert_at_the_same_time,
    servers::limits_hold_for_all_that_are_resumed_at_the_same_time,
    servers::limits_hold_for_all_that_are_paused_at_the_same_time,
    parcels::a_copy_is_that_of_one_pause,
    parcels::a_damaged_copy_counts_and_is_made_again,
    parcels::a_sandbox_moves_once_and_never_behind_a_takeover,
    parcels::a_forgotten_node_whose_sandboxes_have_copies_is_left_alone,
    nodes::a_lease_has_one_owner,
    nodes::one_of_many_concurrent_requests_acquires_a_lease,
    nodes::rows_can_only_be_changed_by_their_node,
    nodes::a_server_that_has_lost_its_lease_changes_nothing,
    nodes::keys_in_progress_belong_to_their_node,
    records::log_queries_apply_every_filter,
    records::teams_read_only_their_own_records,
    records::a_batch_written_twice_is_stored_once,
    records::the_oldest_entries_of_a_log_are_trimmed,
    records::log_retention_begins_at_the_end_of_the_sandbox,
    records::logs_of_the_sandboxes_that_ended_first_are_evicted,
    records::metrics_are_found_by_overlap_and_purged_by_age,
    records::the_last_metrics_of_all_are_one_read,
    concurrency::one_writer_wins_each_version,
    concurrency::extensions_never_shorten,
    concurrency::two_processes_write_at_the_same_time,
    concurrency::cancelled_changes_leave_no_lock,
    concurrency::a_connection_lost_in_a_transaction_is_replaced,
    injection_rules::names_are_unique_for_each_user,
    injection_rules::changes_keep_what_they_do_not_mention,
    injection_rules::sandboxes_have_injections_while_they_run,
    injection_rules::sealed_texts_are_replaced_all_or_none,
    injection_rules::sealed_texts_stay_while_a_server_has_a_lease,
    injection_rules::sealed_texts_are_given_up,
    opening::many_open_a_new_database_at_the_same_time,
    opening::a_second_migration_changes_nothing,
    opening::a_newer_schema_is_refused,
    opening::an_older_schema_is_migrated,
    opening::rows_without_a_node_are_adopted_by_the_first_node,
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
