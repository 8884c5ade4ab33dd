//! The laws of a store: its definition.
//!
//! Each law is a function of a fresh [`Lab`](crate::Lab); [`conformance_suite!`](crate::conformance_suite) makes a test
//! of each for one database.
#![allow(clippy::unwrap_used, clippy::missing_panics_doc, reason = "these are tests")]

pub mod aside;
pub mod atomic;
pub mod attempts;
pub mod batches;
pub mod brokers;
pub mod claims;
pub mod commits;
pub mod counters;
pub mod due;
pub mod enqueue;
pub mod fences;
pub mod following;
pub mod inline;
pub mod leases;
pub mod letters;
pub mod lines;
pub mod looking;
pub mod lost;
pub mod newer;
pub mod nodes;
pub mod outbox;
pub mod pinned;
pub mod queues;
pub mod remote;
pub mod running;
pub mod schedules;
pub mod stepping;
pub mod stores;
pub mod story;
pub mod sweeping;
mod tools;
pub mod waiting;
pub mod working;

/// Makes a test of each law for a database: `conformance_suite!(sqlite, Kind::Sqlite)`.
#[macro_export]
macro_rules! conformance_suite {
    ($name:ident, $kind:expr) => {
        mod $name {
            $crate::conformance_suite!(@laws $kind;
                claims:
                    a_first_claim_acquires_and_the_next_is_replayed,
                    a_second_claim_is_in_flight,
                    each_of_the_seven_answers_is_given,
                    equal_keys_in_two_scopes_are_independent,
                    keys_are_compared_byte_by_byte,
                    a_claim_whose_answer_was_lost_is_recognised,
                    another_payload_is_a_mismatch_in_every_state,
                    an_expired_operation_counts_as_absent,
                    invalid_work_is_refused_before_anything_is_claimed,
                    a_claim_that_is_dropped_frees_its_key;
                batches:
                    one_key_many_times_in_a_batch_is_acquired_once,
                    a_mixed_batch_is_answered_in_its_order,
                    claims_and_writes_share_a_flush,
                    a_poison_claim_fails_no_settle,
                    a_poison_item_fails_alone,
                    a_batch_sent_again_changes_nothing,
                    a_zombie_in_the_owners_batch_is_refused,
                    crossing_batches_both_succeed,
                    without_group_commit_the_answers_are_the_same,
                    a_crowd_takes_over_once,
                    a_crowd_on_two_nodes_gets_one_lease_per_key;
                fences:
                    every_write_of_a_zombie_is_refused,
                    every_write_after_the_sweep_is_refused,
                    a_zombie_never_matches_a_new_row_of_its_key,
                    a_settle_sent_again_is_answered_as_before,
                    the_fences_of_an_operation_only_grow;
                leases:
                    an_outcome_too_large_to_keep_still_completes,
                    a_long_error_is_cut_and_marked_as_cut,
                    a_lease_expires_at_its_deadline,
                    a_late_settle_counts_without_a_takeover,
                    a_lease_can_be_renewed_up_to_the_longest_run,
                    a_dropped_lease_expires,
                    a_released_first_run_leaves_no_trace,
                    a_release_keeps_the_payload_and_counts_no_attempt,
                    a_checkpoint_is_handed_to_the_next_attempt,
                    derived_keys_are_the_same_on_every_attempt,
                    a_failure_decides_when_it_is_retried;
                running:
                    a_run_completes_once,
                    every_end_of_a_handler_is_settled,
                    a_value_is_handed_over_if_its_result_is_stored,
                    a_caller_that_goes_away_does_not_stop_the_run,
                    a_lost_lease_cancels_the_run,
                    a_stuck_run_ends_with_its_longest_run,
                    a_handler_that_blocks_its_runtime_is_still_renewed,
                    a_stop_ends_runs_and_refuses_new_ones,
                    a_stop_does_not_miss_a_run_that_is_about_to_begin,
                    newer_data_is_run_in_the_background;
                newer:
                    only_newer_data_supersedes,
                    newer_data_waits_for_the_run_and_only_newer_replaces_it,
                    newer_data_runs_after_every_end_of_the_older_run,
                    newer_data_waits_while_the_older_is_in_doubt,
                    a_late_owner_of_older_data_does_not_touch_the_newer,
                    another_payload_is_replayed_under_on_mismatch_replay;
                pinned:
                    a_pinned_operation_does_not_change_until_its_retention_ends,
                    only_a_completion_is_pinned,
                    the_policy_of_the_last_claim_decides_whether_it_is_pinned,
                    a_pinned_outcome_is_replayed_without_the_database,
                    the_node_that_completed_it_replays_it_without_the_database,
                    another_payload_is_refused_without_the_database,
                    an_unpinned_operation_is_never_replayed_from_memory,
                    a_pinned_outcome_is_forgotten_with_its_retention,
                    a_ledger_without_memory_asks_each_time;
                lost:
                    a_lost_lease_is_taken_over_under_rerun,
                    a_lost_lease_is_in_doubt_under_hold_and_probe,
                    the_finding_of_a_probe_resolves_a_doubt,
                    of_two_concurrent_probes_one_decides,
                    a_finding_about_an_older_run_is_dropped,
                    a_crash_loop_is_slowed_down_and_parked,
                    a_person_resolves_operations_that_do_not_run,
                    a_decision_that_does_not_fit_is_not_carried_out,
                    a_persons_decision_is_audited;
                attempts:
                    the_backoff_is_kept_by_every_node,
                    an_operation_is_exhausted_after_its_attempts,
                    a_failed_operation_expires_too,
                    failures_and_crashes_are_counted_apart;
                due:
                    a_failed_operation_is_due_after_its_backoff_on_every_node,
                    an_operation_that_waits_for_a_person_is_never_due,
                    an_operation_without_a_delay_is_due_at_once,
                    an_operation_exhausted_under_a_stricter_policy_is_no_longer_due,
                    due_operations_are_taken_in_order_and_within_limits,
                    due_operations_of_one_kind_delay_none_of_another,
                    kinds_of_work_are_counted_up_to_a_limit,
                    an_expired_operation_is_not_due,
                    a_claim_at_once_waits_for_no_backoff,
                    backlog_rows_without_due_times_are_migrated;
                remote:
                    a_lease_is_renewed_and_settled_at_any_node_by_its_fence,
                    an_operation_that_is_left_to_callers_is_never_taken,
                    an_enqueue_takes_over_what_a_caller_has_left,
                    an_enqueued_operation_is_not_settled_before_it_is_taken,
                    of_different_completions_of_one_lease_one_is_stored,
                    a_claim_under_a_callers_token_gets_its_lease_again,
                    a_take_that_is_sent_again_finds_its_leases,
                    a_take_may_ask_for_another_lease_than_the_enqueue;
                enqueue:
                    an_enqueued_operation_is_pending_and_runs_once,
                    an_enqueue_in_a_transaction_commits_with_it,
                    many_are_enqueued_at_once_and_answered_in_order,
                    a_delayed_operation_waits_for_its_time,
                    an_operation_is_tried_since_its_first_claim,
                    higher_priorities_are_taken_first,
                    newer_data_replaces_pending_data,
                    newer_data_that_waits_for_a_run_keeps_the_terms_of_its_enqueue,
                    the_policy_of_an_enqueue_is_kept_until_it_settles,
                    an_enqueue_under_probe_is_refused,
                    an_operation_that_a_worker_finds_exhausted_is_no_longer_due,
                    an_enqueue_is_exhausted_when_the_worker_has_given_up,
                    a_retry_from_the_queue_is_part_of_the_story,
                    a_pending_operation_can_be_cancelled,
                    a_cancel_withdraws_newer_data_that_waits,
                    a_run_can_be_cancelled,
                    a_cancelled_run_that_fails_or_is_released_does_not_run_again,
                    a_failed_operation_does_not_expire_before_its_retry,
                    progress_forgives_crashes,
                    a_paused_kind_is_not_taken,
                    the_limits_of_a_kind_are_shared_by_the_fleet;
                working:
                    a_worker_runs_enqueued_operations,
                    two_workers_share_a_queue,
                    a_commit_wakes_the_worker,
                    a_tenant_with_a_long_backlog_blocks_no_other,
                    a_stop_releases_runs_that_exceed_its_grace,
                    an_unreachable_target_counts_no_attempt,
                    a_run_that_panics_does_not_make_its_target_reachable,
                    an_unreachable_target_uses_up_no_starts_of_a_rate,
                    the_delay_of_an_enqueue_does_not_prolong_the_wait_for_a_target,
                    work_of_another_node_starts_soon,
                    a_commit_wakes_the_worker_among_many_tenants,
                    a_row_that_is_due_before_all_others_is_found,
                    operations_of_a_paused_target_are_put_off_without_a_note,
                    a_stop_does_not_wait_for_the_database,
                    a_take_returns_once_the_refused_row_is_set_aside,
                    newer_data_is_the_workers_next_work,
                    work_of_a_lost_node_goes_on_without_a_sweep,
                    mistakes_in_one_kind_stop_no_other,
                    kinds_beyond_one_transaction_are_taken_in_the_next,
                    an_operation_that_cannot_be_claimed_blocks_no_other,
                    a_worker_retries_as_often_as_the_policy_allows,
                    a_paused_kind_is_rarely_polled,
                    tenants_share_the_limit_of_a_fleet,
                    a_rate_spreads_the_starts,
                    low_priorities_of_each_tenant_have_their_turn,
                    a_stop_during_a_take_hands_back_its_operations;
                schedules:
                    a_new_schedule_starts_now,
                    a_cron_expression_uses_its_time_zone,
                    many_nodes_enqueue_a_run_once,
                    the_mark_decides_which_runs_were_missed,
                    a_run_commits_with_its_mark,
                    a_mark_that_another_node_has_locked_is_skipped,
                    a_changed_schedule_counts_from_now,
                    the_newer_of_two_schedules_survives_an_outage_and_a_pause,
                    a_changed_schedule_takes_over_a_mark_that_was_locked,
                    a_paused_kind_gets_no_runs,
                    a_schedule_that_fails_harms_no_other,
                    schedules_can_be_listed,
                    two_workers_run_a_schedule_once;
                nodes:
                    a_node_stores_a_sign_of_life_and_removes_it_at_its_end,
                    a_sign_of_life_in_flight_does_not_outlive_its_node,
                    the_sign_of_a_worker_has_its_kinds,
                    a_node_that_is_gone_is_forgotten_after_a_day,
                    work_continues_if_signs_of_life_cannot_be_stored,
                    kinds_of_work_are_listed,
                    kinds_of_work_are_counted_up_to_a_bound;
                stepping:
                    a_step_commits_its_rows_with_its_checkpoint,
                    a_step_that_does_not_end_well_is_rolled_back,
                    a_step_under_a_lost_lease_never_happens,
                    a_takeover_during_a_step_rolls_it_back,
                    a_step_forgives_crashes,
                    a_step_can_use_its_transaction_only,
                    a_run_whose_turn_is_over_lets_others_go_first,
                    a_stop_ends_a_run_after_its_step;
                following:
                    a_row_follows_its_operation_through_every_change,
                    a_row_shows_that_its_operation_was_purged,
                    a_row_follows_in_the_transaction_of_the_effect,
                    a_row_follows_an_operation_that_a_worker_runs,
                    a_row_follows_an_operation_that_a_worker_finds_exhausted,
                    a_row_that_refuses_harms_its_own_operation_only,
                    older_rows_are_brought_up_to_date;
                atomic:
                    an_effect_commits_with_its_completion,
                    an_effect_that_fails_is_rolled_back,
                    a_value_is_handed_over_with_its_commit,
                    a_declined_run_stores_its_outcome_without_its_effect,
                    a_transaction_without_a_key_commits_or_does_not,
                    a_lease_that_is_held_can_be_run,
                    known_keys_are_answered_while_an_effect_is_made,
                    an_effect_that_takes_too_long_is_rolled_back,
                    an_effect_under_a_lost_lease_never_happens,
                    an_effect_is_kept_when_newer_data_waits,
                    a_takeover_during_an_effect_leaves_one_effect,
                    when_the_winner_rolls_back_one_waiter_wins,
                    a_loser_is_in_flight_or_waits_while_an_effect_is_made,
                    a_swallowed_error_is_not_reported_as_success,
                    a_handler_can_use_its_transaction_only,
                    a_stop_rolls_an_effect_back_without_counting_an_attempt;
                commits:
                    a_transient_commit_failure_counts_no_attempt,
                    a_refused_commit_is_a_failure,
                    an_endless_transient_failure_is_retried_ever_more_rarely,
                    a_transaction_that_is_over_is_a_failure,
                    a_handler_that_blocks_in_its_transaction_for_too_long_has_failed,
                    a_transaction_without_a_key_distinguishes_transient_failures_from_refusals;
                inline:
                    an_inline_effect_is_made_once,
                    the_second_transaction_waits_for_the_first,
                    an_inline_crowd_makes_one_effect,
                    an_inline_claim_respects_the_existing_row,
                    inline_claims_in_one_go_are_answered_one_by_one,
                    inline_crowds_share_their_keys,
                    an_inbox_lets_a_message_through_once,
                    an_inbox_distinguishes_effects_from_unsettled_operations,
                    an_inbox_remembers_a_message_for_its_retention,
                    a_forgotten_transaction_ends_by_itself,
                    a_commit_reports_whether_anything_was_committed,
                    a_dropped_transaction_is_rolled_back,
                    acknowledged_writes_after_dropped_transactions_are_durable;
                waiting:
                    a_waiter_in_the_same_process_is_woken_at_once,
                    a_waiter_on_another_node_is_woken_soon,
                    waiters_hold_no_connection,
                    a_waiter_that_gives_up_touches_nothing,
                    when_the_owner_gives_up_one_waiter_is_promoted,
                    when_the_lease_expires_a_waiter_takes_over,
                    a_caller_decides_which_operations_it_waits_for,
                    only_an_operation_in_flight_is_waited_for;
                sweeping:
                    expired_leases_end_by_the_terms_of_their_claims,
                    an_operation_whose_lease_is_missing_ends_in_doubt,
                    expiry_removes_everything_of_an_operation,
                    an_archived_operation_keeps_its_key_taken,
                    a_round_is_bounded,
                    counts_that_piled_up_are_folded,
                    many_sweepers_do_each_thing_once,
                    a_completion_and_the_sweep_agree_on_the_winner,
                    a_ledger_sweeps_by_itself;
                aside:
                    a_row_that_cannot_be_read_expires_and_is_archived,
                    an_expired_lease_of_an_unreadable_operation_is_set_aside,
                    a_row_that_the_database_refuses_is_set_aside,
                    rows_that_are_refused_side_by_side_are_set_aside,
                    large_rows_that_are_refused_side_by_side_are_set_aside,
                    a_failing_phase_blocks_no_other,
                    a_counter_row_that_is_refused_is_set_aside,
                    missing_leases_are_found_among_many_and_after_rows_that_are_refused,
                    a_round_is_bounded_in_bytes,
                    a_locked_row_is_swept_later,
                    an_unreadable_operation_blocks_no_renewal,
                    a_listing_shows_unreadable_operations,
                    an_unreadable_due_operation_blocks_no_other,
                    an_unreadable_operation_can_be_purged,
                    an_unreadable_note_is_returned_with_all_others;
                looking:
                    an_operation_is_found_by_its_tenant_only,
                    a_listing_never_crosses_tenants,
                    each_label_finds_its_operations,
                    a_listing_has_exactly_the_matching_operations,
                    filters_hold_together,
                    filtered_pages_are_complete,
                    pages_are_complete_while_rows_are_added,
                    a_page_has_1_to_500_items_and_the_last_has_no_next,
                    kinds_are_found_by_their_prefix;
                story:
                    an_ordinary_operation_needs_no_note,
                    unusual_events_are_noted_in_order,
                    only_a_late_renewal_is_noted,
                    repeats_are_counted_exactly_with_both_ends,
                    repeats_of_two_nodes_add_up,
                    a_flush_ends_after_the_one_before_it,
                    a_waiting_claim_is_one_repeat,
                    a_long_journal_returns_its_newest_notes,
                    the_time_of_the_last_restart_is_returned;
                counters:
                    a_run_that_is_taken_over_is_counted_as_timed_out,
                    a_run_that_ended_while_newer_data_waited_is_counted_by_its_end,
                    state_counts_are_exact_before_and_after_folding,
                    folding_changes_no_total,
                    answers_are_counted,
                    the_histogram_has_the_durations,
                    a_tally_is_the_sum_of_its_counters,
                    a_tally_of_days_is_the_sum_of_its_hours,
                    a_tally_is_bounded_and_marked_as_cut,
                    a_tally_of_a_year_of_days_is_whole;
                outbox:
                    a_message_is_published_only_if_its_transaction_commits,
                    a_taken_message_equals_the_one_that_was_put,
                    an_invalid_message_is_not_put,
                    a_commit_wakes_the_relays,
                    a_row_is_leased_by_one_relay,
                    a_take_is_bounded_in_bytes,
                    an_unreadable_row_is_parked_and_blocks_no_other,
                    a_row_of_another_version_is_postponed_and_not_parked,
                    a_page_of_the_outbox_shows_unreadable_rows,
                    an_expired_lease_is_taken_again,
                    a_lease_is_renewed_by_its_own_token_only,
                    a_locked_row_blocks_no_renewal,
                    a_published_row_is_deleted_and_its_receipt_stays,
                    a_mark_sets_the_state_of_its_row,
                    a_message_waits_for_its_time,
                    a_row_that_commits_late_is_still_taken,
                    a_thousand_messages_go_in_one_put,
                    tenants_have_outboxes_of_their_own,
                    the_outbox_can_be_listed_and_counted,
                    the_outbox_tables_refuse_nonsense;
                lines:
                    a_long_ordering_key_costs_no_more_than_a_short_one,
                    the_messages_of_a_key_go_one_after_the_other,
                    a_parked_message_blocks_its_own_key_only,
                    a_row_that_nothing_blocks_becomes_ready,
                    tending_goes_round_all_keys,
                    crossing_puts_never_deadlock;
                letters:
                    a_letter_is_kept_once,
                    a_letter_keeps_the_whole_message,
                    a_retry_is_begun_by_one_and_counted,
                    a_retry_that_was_not_begun_is_not_counted,
                    an_unreadable_retry_blocks_no_other,
                    a_page_of_letters_shows_unreadable_ones,
                    an_old_token_ends_no_retry,
                    a_retry_ends_with_its_effect,
                    a_retry_that_fails_is_tried_again_or_dead,
                    a_dead_copy_of_a_message_is_the_same_letter,
                    letters_are_found_by_their_filter,
                    redriven_letters_become_retries,
                    a_discarded_letter_is_audited;
                queues:
                    a_message_whose_lease_expired_is_delivered_again,
                    a_delivered_message_is_renewed_while_it_is_handled,
                    a_message_taken_by_another_consumer_is_lost_and_not_renewed,
                    a_message_that_was_not_begun_is_not_marked_redelivered,
                    a_message_that_cannot_be_read_becomes_a_dead_letter,
                    messages_that_cannot_be_read_are_put_aside_a_batch_at_a_time,
                    a_consumer_pauses_while_it_can_put_nothing_aside,
                    a_message_of_another_version_is_postponed_and_no_dead_letter,
                    reused_row_ids_lose_no_letter,
                    a_damaged_message_does_not_stop_its_queue,
                    a_topic_without_a_queue_is_unroutable,
                    the_embedded_broker_is_up_while_its_database_answers;
                stores:
                    the_tables_refuse_nonsense,
                    a_person_can_read_the_rows,
                    nodes_that_start_together_migrate_once,
                    an_older_node_on_a_newer_schema_is_refused_and_changes_nothing,
                    a_reworded_migration_is_known_by_its_first_checksum,
                    a_database_with_the_released_checksums_opens,
                    a_database_can_be_opened_again,
                    a_wrong_url_is_refused_with_the_reason;
            );
        }
    };
    (@laws $kind:expr; $($module:ident: $($law:ident),+;)+) => {
        $(mod $module {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $law() {
                $crate::conformance::$module::$law($crate::Lab::new($kind).await).await;
            })+
        })+
    };
}
