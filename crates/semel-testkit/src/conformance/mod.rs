//! The laws of a store. A database that passes them all is one.
//!
//! Each law is a function of a fresh [`Lab`](crate::Lab), named by what it says;
//! [`conformance_suite!`](crate::conformance_suite) makes a test of each for one database.
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
pub mod inline;
pub mod leases;
pub mod letters;
pub mod lines;
pub mod looking;
pub mod lost;
pub mod newer;
pub mod outbox;
pub mod pinned;
pub mod queues;
pub mod running;
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
                    equal_keys_in_two_scopes_never_meet,
                    keys_are_told_apart_byte_by_byte,
                    a_claim_whose_answer_was_lost_is_recognised,
                    another_payload_is_a_mismatch_in_every_state,
                    an_expired_operation_counts_as_absent,
                    invalid_work_is_refused_before_anything_is_claimed,
                    a_claim_that_is_dropped_frees_its_key;
                batches:
                    one_key_many_times_in_a_batch_is_acquired_once,
                    a_mixed_batch_is_answered_in_its_order,
                    claims_and_writes_share_a_flush,
                    a_poison_claim_does_not_take_settles_down,
                    a_poison_item_fails_alone,
                    a_batch_sent_again_changes_nothing,
                    a_zombie_in_the_owners_batch_is_told_apart,
                    crossing_batches_get_through,
                    without_group_commit_the_answers_are_the_same,
                    a_crowd_takes_over_once,
                    a_crowd_on_two_nodes_gets_one_lease_per_key;
                fences:
                    every_write_of_a_zombie_is_refused,
                    every_write_after_the_sweep_is_refused,
                    a_zombie_never_matches_a_row_made_anew,
                    a_settle_sent_again_is_answered_as_before,
                    the_fences_of_an_operation_only_grow;
                leases:
                    an_outcome_too_large_to_keep_still_completes,
                    an_error_of_any_length_is_cut_and_says_so,
                    a_lease_has_lapsed_at_its_deadline,
                    a_late_settle_counts_while_nobody_has_taken_over,
                    a_lease_can_be_renewed_up_to_the_longest_run,
                    a_dropped_lease_lapses,
                    a_released_first_run_leaves_no_trace,
                    a_release_keeps_the_payload_and_costs_no_attempt,
                    a_checkpoint_is_handed_to_the_next_attempt,
                    derived_keys_are_the_same_on_every_attempt,
                    a_failure_says_when_it_may_be_tried_again;
                running:
                    a_run_completes_once,
                    however_a_handler_ends_it_is_settled,
                    a_caller_that_goes_away_does_not_stop_the_run,
                    a_lost_lease_cancels_the_run,
                    a_stuck_run_ends_with_its_longest_run,
                    a_handler_that_blocks_its_runtime_is_still_renewed,
                    a_stop_ends_what_runs_and_refuses_what_is_new,
                    a_stop_does_not_miss_a_run_that_is_about_to_begin,
                    newer_data_is_run_in_the_background;
                newer:
                    only_newer_data_supersedes,
                    newer_data_waits_for_the_run_and_only_newer_replaces_it,
                    however_the_run_ends_newer_data_has_its_turn,
                    newer_data_waits_while_the_older_is_in_doubt,
                    a_late_owner_of_older_data_does_not_touch_the_newer,
                    another_payload_is_replayed_where_the_policy_says_so;
                pinned:
                    what_is_pinned_stays_as_it_is_until_its_retention_ends,
                    only_a_completion_is_pinned,
                    whoever_claims_last_says_whether_it_is_pinned,
                    a_pinned_outcome_is_replayed_without_the_database,
                    who_completed_it_replays_it_without_the_database,
                    another_payload_is_refused_without_the_database,
                    what_is_not_pinned_is_never_replayed_from_memory,
                    a_pinned_outcome_is_forgotten_with_its_retention,
                    a_ledger_without_memory_asks_each_time;
                lost:
                    a_lost_lease_is_taken_over_under_rerun,
                    a_lost_lease_is_in_doubt_under_hold_and_probe,
                    a_probe_settles_what_it_finds_out,
                    of_two_probes_one_has_its_way,
                    a_finding_about_an_older_run_is_dropped,
                    a_crash_loop_is_slowed_down_and_parked,
                    a_person_settles_what_nobody_runs,
                    a_decision_that_does_not_fit_is_not_carried_out,
                    a_persons_decision_is_audited;
                attempts:
                    the_backoff_is_kept_by_every_node,
                    an_operation_is_exhausted_after_its_attempts,
                    a_failed_operation_expires_too,
                    failures_and_crashes_are_counted_apart;
                due:
                    what_failed_is_due_after_its_backoff_on_every_node,
                    what_a_person_must_decide_about_is_never_due,
                    what_waits_for_nothing_is_due_at_once,
                    what_a_stricter_policy_gives_up_is_no_longer_due,
                    what_is_due_is_told_in_order_and_in_bounds,
                    what_is_due_of_one_kind_hides_nothing_of_another,
                    kinds_are_told_of_in_bounds,
                    what_has_expired_is_not_due,
                    a_claim_at_once_waits_for_no_backoff,
                    a_list_from_before_it_had_times_is_brought_up_to_date;
                enqueue:
                    what_is_enqueued_waits_and_runs_once,
                    what_is_enqueued_in_a_transaction_commits_with_it,
                    many_are_enqueued_at_once_and_answered_in_order,
                    what_is_enqueued_for_later_waits_for_its_time,
                    what_has_a_higher_priority_is_taken_first,
                    newer_data_replaces_what_waits,
                    the_policy_of_an_enqueue_is_kept_until_it_settles,
                    what_a_worker_gives_up_is_no_longer_due,
                    a_retry_from_the_queue_is_part_of_the_story,
                    what_waits_can_be_cancelled,
                    a_run_can_be_cancelled,
                    progress_forgives_crashes,
                    a_paused_kind_is_left_alone,
                    the_limits_of_a_kind_are_the_fleets;
                working:
                    a_worker_runs_what_is_enqueued,
                    two_workers_share_a_queue,
                    a_commit_wakes_the_worker,
                    a_tenant_with_much_to_do_keeps_no_other_waiting,
                    a_stop_puts_back_what_it_cannot_wait_for,
                    a_target_that_is_away_costs_no_attempt,
                    a_worker_tries_again_as_often_as_the_policy_says;
                atomic:
                    an_effect_commits_with_its_completion,
                    an_effect_that_fails_is_rolled_back,
                    what_is_declined_is_stored_without_its_effect,
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
                    a_stop_rolls_an_effect_back_at_no_cost;
                commits:
                    what_the_database_could_not_commit_costs_no_attempt,
                    what_the_database_will_not_commit_is_a_failure,
                    trouble_without_end_is_met_ever_more_seldom,
                    a_transaction_that_is_over_is_a_failure,
                    a_handler_that_blocks_in_its_transaction_for_too_long_has_failed,
                    a_transaction_without_a_key_says_whose_trouble_it_was;
                inline:
                    an_inline_effect_is_made_once,
                    the_second_transaction_waits_for_the_first,
                    an_inline_crowd_makes_one_effect,
                    an_inline_claim_goes_by_what_is_there,
                    inline_claims_in_one_go_are_answered_one_by_one,
                    inline_crowds_share_their_keys,
                    an_inbox_lets_a_message_through_once,
                    an_inbox_tells_what_took_effect_from_what_is_not_settled,
                    a_forgotten_transaction_ends_by_itself,
                    a_commit_says_whether_anything_was_committed,
                    a_dropped_transaction_is_rolled_back,
                    what_is_acknowledged_after_dropped_transactions_is_there;
                waiting:
                    a_waiter_in_the_same_process_is_told_at_once,
                    a_waiter_on_another_node_is_told_soon,
                    waiters_hold_no_connection,
                    a_waiter_that_gives_up_touches_nothing,
                    when_the_owner_gives_up_one_waiter_is_promoted,
                    when_the_lease_lapses_a_waiter_takes_over,
                    only_what_is_worth_it_is_waited_for,
                    only_what_is_in_flight_is_waited_for;
                sweeping:
                    orphans_end_by_their_own_terms,
                    an_operation_whose_lease_is_missing_ends_in_doubt,
                    expiry_removes_everything_of_an_operation,
                    an_archived_operation_keeps_its_key_taken,
                    a_round_is_bounded,
                    counts_that_piled_up_are_folded,
                    many_sweepers_do_each_thing_once,
                    a_completion_and_the_sweep_agree_who_came_first,
                    a_ledger_sweeps_by_itself;
                aside:
                    a_row_that_cannot_be_read_expires_and_is_archived,
                    a_lapsed_lease_that_cannot_be_read_is_set_aside,
                    a_row_that_the_database_refuses_is_set_aside,
                    rows_that_are_refused_side_by_side_are_set_aside,
                    large_rows_that_are_refused_side_by_side_are_set_aside,
                    a_phase_that_fails_keeps_no_other_from_its_turn,
                    a_counter_row_that_is_refused_is_set_aside,
                    missing_leases_are_found_among_many_and_after_rows_that_are_refused,
                    a_round_is_bounded_in_bytes,
                    a_locked_row_is_swept_later,
                    an_operation_that_cannot_be_read_keeps_no_other_lease_from_being_renewed,
                    a_listing_shows_what_cannot_be_read,
                    what_is_due_and_cannot_be_read_keeps_no_other_waiting,
                    what_cannot_be_read_can_be_purged,
                    a_note_that_cannot_be_read_hides_no_other;
                looking:
                    an_operation_is_found_by_its_tenant_only,
                    a_listing_never_crosses_tenants,
                    each_label_finds_what_has_it,
                    a_listing_is_what_its_filter_says,
                    filters_hold_together,
                    filtered_pages_are_complete,
                    pages_are_complete_while_rows_are_added,
                    a_page_is_1_to_500_long_and_the_last_says_so,
                    kinds_are_told_by_what_they_begin_with;
                story:
                    an_ordinary_life_costs_no_note,
                    what_is_out_of_the_ordinary_is_told_in_order,
                    only_a_late_renewal_is_told,
                    repeats_are_counted_exactly_with_both_ends,
                    repeats_of_two_nodes_add_up,
                    a_flush_ends_after_the_one_before_it,
                    a_waiting_claim_is_one_repeat,
                    of_a_long_story_the_end_is_told,
                    when_an_operation_began_anew_is_told;
                counters:
                    a_run_that_is_taken_over_is_counted_as_timed_out,
                    a_run_that_ended_while_newer_data_waited_is_counted_by_its_end,
                    state_counts_are_exact_before_and_after_folding,
                    folding_changes_no_total,
                    answers_are_counted,
                    durations_are_told_by_the_histogram,
                    a_tally_is_the_sum_of_its_counters,
                    a_tally_of_days_is_the_sum_of_its_hours,
                    a_tally_is_bounded_and_says_so,
                    a_tally_of_a_year_of_days_is_whole;
                outbox:
                    a_message_is_there_if_its_transaction_commits,
                    a_message_comes_back_whole,
                    what_cannot_be_sent_is_not_put,
                    a_commit_wakes_the_relays,
                    a_row_is_in_one_relays_hands,
                    a_take_is_bounded_in_bytes,
                    a_row_that_cannot_be_read_is_parked_and_keeps_no_other_waiting,
                    a_row_of_another_version_is_put_off_and_not_parked,
                    a_page_of_the_outbox_shows_what_cannot_be_read,
                    a_lapsed_lease_is_taken_anew,
                    a_lease_is_renewed_by_its_own_token_only,
                    a_locked_row_holds_up_no_renewal,
                    what_was_sent_is_gone_and_its_receipt_stays,
                    a_mark_says_what_becomes_of_a_row,
                    a_message_waits_for_its_time,
                    a_row_that_commits_late_is_still_taken,
                    a_thousand_messages_go_in_one_put,
                    tenants_have_outboxes_of_their_own,
                    the_outbox_can_be_looked_at,
                    the_outbox_tables_refuse_nonsense;
                lines:
                    a_long_line_costs_no_more_than_a_short_one,
                    the_messages_of_a_key_go_one_after_the_other,
                    a_parked_message_blocks_its_own_key_only,
                    what_nothing_blocks_goes_on,
                    tending_goes_round_all_keys,
                    crossing_puts_never_deadlock;
                letters:
                    a_letter_is_kept_once,
                    a_letter_comes_back_whole,
                    a_retry_is_begun_by_one_and_counted,
                    a_retry_that_was_not_begun_is_not_counted,
                    a_retry_that_cannot_be_read_keeps_no_other_waiting,
                    a_page_of_letters_shows_what_cannot_be_read,
                    an_old_token_ends_no_retry,
                    a_retry_ends_with_its_effect,
                    a_retry_that_fails_is_tried_again_or_dead,
                    a_copy_that_dies_is_the_same_letter,
                    letters_are_found_by_their_filter,
                    letters_are_given_back_to_their_consumers,
                    a_discarded_letter_is_audited;
                queues:
                    a_message_whose_time_is_over_is_delivered_again,
                    a_message_in_hand_is_renewed_for_as_long_as_it_takes,
                    a_message_that_another_has_is_lost_and_not_renewed,
                    what_was_not_begun_is_not_redelivered,
                    a_message_that_cannot_be_read_becomes_a_dead_letter,
                    messages_that_cannot_be_read_are_put_aside_a_batch_at_a_time,
                    a_consumer_pauses_while_it_can_put_nothing_aside,
                    a_message_of_another_version_is_put_off_and_not_buried,
                    row_numbers_that_come_again_lose_no_letter,
                    a_damaged_message_does_not_stop_its_queue,
                    a_topic_without_a_queue_is_unroutable,
                    a_broker_is_as_well_as_its_database;
                stores:
                    the_tables_refuse_nonsense,
                    a_person_can_read_the_rows,
                    nodes_that_start_together_migrate_once,
                    an_older_node_on_a_newer_schema_is_refused_and_changes_nothing,
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
