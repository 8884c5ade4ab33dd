#!/usr/bin/env bash
# Breaks Semel on purpose, one rule at a time, and checks that a named test notices. A test that cannot fail proves
# nothing. By hand, or as part of `make torture`: each mutant is a build of its own.
#
#   mutants.sh           all of them
#   mutants.sh NAME…     some of them
#   mutants.sh --check   only whether each can still be made and names tests that are there; needs no server and no build
#
# The mutations are made in a copy of the working tree, target/mutants/tree, with its own build directory. Exits
# non-zero if a mutant survives, or can no longer be made because the code has changed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# The tests need a server.
[[ ${1:-} == --check || -n ${SEMEL_TEST_POSTGRES_URL:-} ]] || exec scripts/postgres.sh run scripts/mutants.sh "$@"

root=$PWD
tree=$root/target/mutants/tree
export CARGO_TARGET_DIR=$root/target/mutants/build
# Mutants are built without debug information: no line is looked up in them.
export CARGO_PROFILE_DEV_DEBUG=0
unset RUST_BACKTRACE SEMEL_TORTURE

# NAME @ FILE @ what perl does to the text of the whole file @ package @ tests (nextest's filter), any of which may
# notice
mutants() {
    cat <<'LIST'
projected-plain@semel-store/src/rows.rs@s/followed \|\| op\.successor\.is_some\(\)/op.successor.is_some()/@semel-store@test(=sqlite::following::a_row_follows_its_operation_through_every_change)
projected-locked@semel-store/src/postgres/settles.rs@s/if part\.len\(\) == 1 \|\| Instant::now\(\) >= until/if !part.is_empty()/@semel-store@test(=locked_followers::only_the_settle_of_a_locked_row_waits)
projected-gave-up@semel-store/src/take.rs@s/match self\.take_off_due\(id, fence\)\.await/match Ok::<(), Error>(drop((id, fence)))/@semel-store@test(=sqlite::following::a_row_follows_an_operation_that_a_worker_finds_exhausted)
carried-settled@semel-server/src/services/notifications/carry_over.rs@s/let projected = ledger\.store\(\)\.project_in\(tx, &operations\)\.await\?;/let projected = operations.clone();/@semel-server@test(=deliveries_carried_over::sqlite::deliveries_settled_by_an_earlier_version_are_not_repeated)
carried-unchecked@semel-server/src/services/notifications/carry_over.rs@s/silent >= WATCH && self\.check_all\(&mut checkpoint\)\.await\?/silent >= WATCH/@semel-server@test(=deliveries_older_nodes::sqlite::statuses_that_an_older_node_did_not_write_are_corrected_before_the_migration_ends)
carried-locked@semel-server/src/services/notifications/deliver_tables.rs@s/ORDER BY id FOR NO KEY UPDATE SKIP LOCKED/ORDER BY id FOR NO KEY UPDATE/@semel-server@test(=deliveries_older_nodes::locked_notifications_are_carried_over_later)
carried-halved@semel-server/src/services/notifications/carry_over.rs@s/Err\(Unfinished::Failed\(_\)\) if part\.len\(\) > 1 =>/Err(Unfinished::Failed(_)) if part.len() > 100_000 =>/@semel-server@test(=deliveries_older_nodes::sqlite::a_notification_whose_operation_is_unreadable_keeps_no_other_from_being_carried_over)
sql-fingerprint@semel-store/migrations/postgres/0015_sql.sql@s/semel fingerprint 1: bytes/semel fingerprint 1: text/@semel-store@test(=by_sql::enqueue::the_library_knows_the_bytes_that_sql_has_fingerprinted)
sql-epoch@semel-store/migrations/postgres/0015_sql.sql@s/WHERE e\.one AND \(.*? IS NOT TRUE;/WHERE e.one;/@semel-store@test(=by_sql::enqueue::nothing_is_enqueued_on_another_server_before_a_node_has_raised_the_epoch)
sql-scan@semel-store/migrations/postgres/0015_sql.sql@s/ SET enable_seqscan = off//g@semel-store@test(=by_sql::enqueue::no_call_scans_a_table)
sql-expired@semel-store/migrations/postgres/0015_sql.sql@s/INSERT INTO \{schema\}\.semel_deltas\n[^;]*known\.state[^;]*;/NULL;/@semel-store@test(=by_sql::known::a_key_past_its_retention_is_free_although_the_sweep_has_not_come)
sql-mismatch@semel-store/migrations/postgres/0015_sql.sql@s/known\.fingerprint <> fingerprint AND get_byte\(known\.fingerprint, 0\) = 1/known.fingerprint <> fingerprint/@semel-store@test(=by_sql::known::a_known_key_is_answered_as_the_library_answers_it_and_is_not_changed)
sql-blocked@semel-store/migrations/postgres/0015_sql.sql@s/state := 'blocked';/state := state;/@semel-store@test(=by_sql::publish::messages_of_a_key_by_sql_and_by_the_library_are_in_one_line)
sql-path@semel-store/migrations/postgres/0015_sql.sql@s/SECURITY DEFINER SET search_path = pg_catalog, pg_temp/SECURITY DEFINER/g@semel-store@test(=by_sql::rights::objects_of_the_caller_do_not_stand_in_for_those_of_the_functions)
sql-rights@semel-store/migrations/postgres/0015_sql.sql@s/REVOKE ALL ON FUNCTION .*?;//@semel-store@test(=by_sql::rights::a_role_without_the_right_to_execute_them_cannot_use_the_functions)
sql-wake@semel-store/migrations/postgres/0015_sql.sql@s/PERFORM \{schema\}\.semel_wake\('outbox'\);//@semel-store@test(=by_sql::wakes::a_trigger_publishes_and_wakes_a_sleeping_relay)
sql-heard@semel-store/src/wakes.rs@s/"due" => Some\(Self::Due\(None\)\),//@semel-store@test(=by_sql::wakes::a_commit_by_sql_wakes_a_sleeping_worker)
lingering@semel-server/src/serve/linger.rs@s/has_body && refused/has_body && !refused/@semel-server@test(=connections::a_body_that_is_refused_while_it_is_sent_is_answered)
fence-postgres@semel-store/src/postgres/hot.rs@s/ AND l\.fence = a\.fence AND NOT l\.successor/ AND NOT l.successor/; s/WHERE o\.id = g\.operation AND o\.fence = g\.fence/WHERE o.id = g.operation/@semel-testkit@test(=zombies::postgres::a_zombie_is_refused_on_every_write)
fence-one-postgres@semel-store/src/postgres/hot.rs@s/WHERE l\.operation = \$1 AND l\.fence = \$2 AND NOT/WHERE l.operation = \$1 AND NOT/; s/WHERE o\.id = \$1 AND o\.fence = \$2/WHERE o.id = \$1 AND \$2::bigint > 0/@semel-store@test(=postgres::atomic::an_effect_under_a_lost_lease_never_happens)
fence-one-sqlite@semel-store/src/sqlite/hot.rs@s/l\.operation = \$1 AND l\.fence = \$2 AND NOT/l.operation = \$1 AND NOT/; s/semel_operations\.id = \$1 AND semel_operations\.fence = \$2/semel_operations.id = \$1/; s/WHERE operation = \$1 AND fence = \$2 AND NOT/WHERE operation = \$1 AND NOT/@semel-store@test(=sqlite::atomic::an_effect_under_a_lost_lease_never_happens)
fence-last-postgres@semel-store/migrations/postgres/0005_complete.sql@s/ AND l\.fence = held AND NOT/ AND NOT/; s/ AND o\.fence = held//@semel-store@test(=postgres::atomic::an_effect_under_a_lost_lease_never_happens)
fence-last-sqlite@semel-store/src/sqlite/hot.rs@s/l\.operation = \$1 AND l\.fence = \$2 AND NOT/l.operation = \$1 AND NOT/; s/semel_operations\.id = \$1 AND semel_operations\.fence = \$2/semel_operations.id = \$1/; s/ WHERE id = \$1 AND fence = \$2 AND state/ WHERE id = \$1 AND state/@semel-store@test(=sqlite::atomic::an_effect_under_a_lost_lease_never_happens)
fence-renew-postgres@semel-store/src/postgres/hot.rs@s/ON l\.operation = a\.id AND l\.fence = a\.fence\n/ON l.operation = a.id\n/@semel-testkit@test(=zombies::postgres::a_zombie_is_refused_on_every_write)
fence-renew-sqlite@semel-store/src/sqlite/hot.rs@s/(const HELD.*?)WHERE \(operation, fence\) IN \(SELECT value ->> 0, value ->> 1 FROM/$1WHERE operation IN (SELECT value ->> 0 FROM/s@semel-testkit@test(=zombies::sqlite::a_zombie_is_refused_on_every_write)
fence-machine@semel/src/machine/settle.rs@s/Some\(op\) if op\.fence == fence => match/Some(op) if op.fence >= fence => match/@semel-testkit@test(=zombies::sqlite::a_zombie_is_refused_on_every_write)
fence-commit@semel/src/store/operations.rs@s/(Ok\(applied . Applied \{ answer: Answer::Settled \{ successor \}, \.\. \}\) => \(applied, successor\),)/$1\n        Ok(applied) if held.id != 0 => (applied, false),/@semel-store@test(=postgres::atomic::a_takeover_during_an_effect_leaves_one_effect)
fence-step@semel/src/step.rs@s/Ok\(Applied \{ answer: Answer::Written, \.\. \}\) => \{\}/Ok(Applied { answer: Answer::Written | Answer::Lost, .. }) => {}/@semel-store@test(=sqlite::stepping::a_takeover_during_a_step_rolls_it_back)
step-progress@semel/src/step.rs@s/self\.step_as\(Write::Progress, work\)/self.step_as(Write::Checkpoint, work)/@semel-store@test(=sqlite::stepping::a_step_forgives_crashes)
turn@semel/src/lease.rs@s/self\.until\.is_some_and\(Uptime::has_passed\) \|\| //@semel-store@test(=sqlite::stepping::a_run_whose_turn_is_over_lets_others_go_first)
sort@semel-store/src/batch.rs@s/let mut order: Vec<usize> = \(0\.\.requests\.len\(\)\)\.collect\(\);\n    order\.sort_by\(.*?\n    \}\);\n/let order: Vec<usize> = (0..requests.len()).collect();\n/s@semel-testkit@test(=deadlocks::two_nodes_with_opposite_batches_do_not_deadlock)
sort-known@semel-store/src/postgres/claims.rs@s/order\.iter\(\)\.copied\(\)\.filter\(\|i\| absent\.contains\(i\)\)\.collect\(\)/absent.iter().copied().collect()/@semel-testkit@test(=deadlocks::two_nodes_with_opposite_batches_do_not_deadlock)
busy-in-flight@semel/src/machine/claim.rs@s/false if waits \|\| row\.fingerprint\.matches\(&request\.fingerprint\) =>/false if waits || row.id > 0 =>/@semel-store@test(=contention::a_locked_row_is_in_flight_only_for_claims_with_the_stored_payload)
busy-batch@semel-store/src/postgres/claims.rs@s/false => self\.claim_apart\(&mut seat, requests, new, answers\)\.await\?,/false => return Err(Error::Unavailable("busy".into())),/@semel-store@test(=contention::an_uncommitted_insert_blocks_no_other_key)
busy-lane@semel/src/ledger/ask.rs@s/if self\.inner\.aside\.has\(request\) \{/if self.inner.aside.has(request) \&\& request.owner.is_empty() {/@semel-store@test(=contention::an_uncommitted_insert_blocks_no_other_key)
lost-claims@semel/src/ledger/ask.rs@s/self\.ledger\.inner\.withdrawals\.add\(self\.request\);//@semel-testkit@test(=cuts::claims_with_lost_answers_are_withdrawn)
lost-data@semel/src/machine/settle.rs@s/match is_first && \(doubts \|\| is_bare\(&op\)\)/match is_first \&\& (doubts || op.id > 0)/@semel-testkit@test(=cuts::data_answered_in_flight_outlives_the_withdrawn_claim_that_stored_it)
lost-claims-apart@semel/src/withdrawals.rs@s/for one in some \{/for one in \&some[..0] {/@semel-testkit@test(=cuts::a_lost_claim_that_cannot_be_withdrawn_blocks_no_other)
claimed-in-part@semel-store/src/postgres/claims.rs@s/answers\.values\(\)\.any\(\|applied\| applied\.answer != Answer::Busy\) =>/answers.values().any(|_| false) =>/@semel-testkit@test(=cuts::claims_that_are_committed_are_answered_when_the_rest_of_their_batch_fails)
uncounted-wait@semel/src/run.rs@s/let _counted = ledger\.enter\(\);\n//@semel-store@test(=sqlite::running::a_stop_does_not_miss_a_run_that_is_about_to_begin)
read-back@semel/src/atomic.rs@s/Ended::Unknown \{ why, successor \} => self\.read_back\([^)]*\)\.await/Ended::Unknown { why, .. } => Ok(Fate::RolledBack(rolled_back(\&why)))/@semel-testkit@test(=cuts::the_connection_cut_after_every_byte_of_the_commit_reply)
epoch-other-server@semel-store/src/postgres/epoch.rs@s/\(Some\(known\), Some\(here\)\) if known != here => here\.timeline\.max\(1\),/(Some(known), Some(here)) if known != here => 0,/@semel-store@test(=postgres::epoch::tests::the_epoch_is_raised_with_the_server_and_never_lowered)
epoch-shown@semel-store/src/postgres/epoch.rs@s/stored\.epoch\.max\(shown\) \+ steps/stored.epoch + steps/@semel-store@test(=epochs::fences_only_grow_after_every_change_of_the_server)
epoch-of-takeovers@semel-store/src/postgres/epoch.rs@s/\(SELECT max\(fence\) FROM semel_operations\)/(SELECT max(id) FROM semel_operations)/@semel-store@test(=epochs::a_fence_that_was_drawn_for_a_takeover_counts_where_there_is_no_epoch)
epoch-read-error@semel-store/src/postgres/epoch.rs@s/(async fn check\(.*?)let seen = see\(conn\)\.await\?;/$1let Ok(seen) = see(conn).await else { return Ok(()) };/s@semel-store@test(=epochs::an_epoch_that_cannot_be_read_keeps_a_node_from_starting)
newer-schema@semel-store/src/migrations.rs@s/(Migrator::with_migrations\(files\.iter\(\)\.map\(migration\)\.collect\(\)\))/let mut migrator = $1;\n    migrator.set_ignore_missing(true);\n    migrator/@semel-store@test(=sqlite::stores::an_older_node_on_a_newer_schema_is_refused_and_changes_nothing) | test(=postgres::stores::an_older_node_on_a_newer_schema_is_refused_and_changes_nothing)
reworded-migration@semel-store/src/migrations.rs@s/-- Checksum of the first text: /-- Checksum: /@semel-store@test(=sqlite::stores::a_reworded_migration_is_known_by_its_first_checksum) | test(=postgres::stores::a_reworded_migration_is_known_by_its_first_checksum)
migration-lock@semel-store/src/postgres/schema.rs@s/SET lock_timeout = '1500ms'/SET lock_timeout = 0/@semel-store@test(=migrating::a_migration_behind_a_long_reader_lets_others_pass_and_is_made_once)
few-connections@semel-store/src/postgres/room.rs@s/error\.code\(\)\.as_deref\(\) == Some\("53300"\) \|\| //@semel-store@test(=few_connections::a_burst_on_few_connections_is_served_without_an_error)
few-for-the-ledger@semel-store/src/postgres/room.rs@s/const RESERVED: usize = 2/const RESERVED: usize = 0/@semel-store@test(=few_connections::callers_leave_connections_to_the_ledger)
idle-connections@semel-store/src/postgres/seats.rs@s/left\.elapsed\(\) >= limit\)\.count\(\)/left.elapsed() >= limit * 100_000).count()/@semel-store@test(=few_connections::connections_that_nothing_uses_are_closed)
few-shared@semel-store/src/postgres/seats.rs@s/self\.rank == Rank::Ledger \|\| in_use < 2 \{/self.rank == Rank::Ledger || in_use < 2_000 {/@semel-store@test(=few_connections::concurrent_callers_share_a_connection_that_is_soon_free)
few-warning@semel-store/src/postgres/schema.rs@s/is_ok_and\(\|allowed\| allowed < wanted\)/is_ok_and(|allowed| allowed < wanted.min(1))/@semel-server@test(=ready::a_node_with_too_few_allowed_connections_logs_it_at_the_start)
few-in-a-burst@semel-store/src/postgres/room.rs@s/error\.code\(\)\.as_deref\(\) == Some\("53300"\) \|\| //@semel-server@test(=ready::heavy_no_request_of_a_burst_on_few_connections_is_refused)
pooler-mode@semel-store/src/postgres/pooler.rs@s/        check\(&mut conn, &mut other\)\.await\?;\n/        let _ = check(\&mut conn, \&mut other).await;\n/@semel-testkit@test(=pgbouncer::other_modes_of_a_pooler_are_refused_at_the_start)
epoch-after-dump@semel-store/src/postgres/epoch.rs@s/if seen\.is_below\(epoch\) \{ shown \+ 1 \} else \{ epoch \}/epoch/@semel-store@test(=postgres::epoch::tests::the_epoch_is_raised_with_the_server_and_never_lowered)
own-claim@semel/src/machine/claim.rs@s/(fn is_own\(.*?\{\n).*?\n\}/$1    op.lease.is_none() && request.owner.is_empty()\n}/s@semel-testkit@test(=cuts::the_connection_cut_after_every_byte_of_a_claim_and_a_completion)
made-before@semel/src/machine/settle.rs@s/None => made_before\(op, write\)/None => refused(op, fence, write, now)/@semel-testkit@test(=cuts::the_connection_cut_after_every_byte_of_a_claim_and_a_completion)
dedup-postgres@semel-store/src/postgres/hot.rs@s/    ON CONFLICT \(tenant, service, kind, key\) DO NOTHING\n//@semel-testkit@test(=heavy::postgres::heavy_512_tasks_on_100_keys_over_two_processes_make_100_effects)
dedup-sqlite@semel-store/src/sqlite/hot.rs@s/     ON CONFLICT \(tenant, service, kind, key\) DO NOTHING;/;/@semel-store@test(=sqlite::claims::a_second_claim_is_in_flight)
swapped-terms-postgres@semel-store/src/postgres/inserts.rs@s/(\.bind\(span\(&\|r\| r\.policy\.retention\)\))(\s+)(\.bind\(span\(&\|r\| r\.policy\.tombstone\)\))/$3$2$1/@semel-store@test(=histories::prop_postgres_agrees_with_the_machine)
swapped-terms-sqlite@semel-store/src/sqlite/hot.rs@s/value ->> 4, value ->> 5,/value ->> 5, value ->> 4,/@semel-store@test(=histories::prop_sqlite_agrees_with_the_machine)
locked-renewal@semel-store/src/postgres/hot.rs@s/FOR UPDATE OF l SKIP LOCKED/FOR UPDATE OF l/@semel-store@test(=locked_leases::a_node_loses_a_locked_lease_and_no_other)
locked-settle@semel-store/src/postgres/settles.rs@s/self\.locked\.has\(writes\[\*i\]\.id\)/self.locked.has(writes[*i].id) \&\& writes.is_empty()/; s/lock_timeout = '250ms'/lock_timeout = '10s'/@semel-store@test(=locked_leases::only_the_settle_of_a_locked_lease_waits)
renewal-patience@semel/src/renewer/agenda.rs@s/\.map\(\|held\| patience\(held\.term\)\)\.max\(\)/.map(|held| patience(held.term)).min()/@semel@test(=renewer::tests::a_late_answer_still_counts_for_the_leases_that_can_wait)
renewal-seat@semel-store/src/postgres/renewals.rs@s/self\.renewals\.take\(\)/self.lane.take()/@semel-store@test(=locked_leases::renewals_have_connections_of_their_own)
renewal-stories@semel/src/renewer.rs@s/notes\.spawn\(write_notes\(note\.clone\(\)\)\);/write_notes(note.clone()).await;\n                        notes.spawn(async {});/@semel@test(=renewer::tests::renewals_do_not_wait_for_the_journal)
waiters-scan@semel/src/waiters.rs@s/if let Some\(entry\) = self\.waiting\.lock\(\)\.get\(&id\) \{/if let Some((_, entry)) = self.waiting.lock().iter().find(|(key, _)| **key == id) {/@semel@test(=waiters::tests::the_cost_of_a_wake_up_is_independent_of_the_number_of_waiters)
waiters-glance@semel/src/waiters.rs@s/running\.get\(id\) != Some\(&entry\.fence\)/running.iter().find(|(key, _)| *key == id).map(|(_, fence)| fence) != Some(\&entry.fence)/@semel@test(=waiters::tests::the_cost_of_a_glance_per_run_is_independent_of_their_number)
key-after-commit@semel-store/src/tx.rs@s/SAVEPOINT semel; \{complete\}; COMMIT/SAVEPOINT semel; COMMIT; {complete}/@semel-store@test(=submissions::no_submission_commits_without_its_key_under_timeouts_and_lost_connections)
long-text@semel/src/machine/settle.rs@s/error: bounded\(error\), retry/error, retry/@semel-store@test(=sqlite::leases::a_long_error_is_cut_and_marked_as_cut)
text-weight@semel/src/machine/settle.rs@s/2 \* error\.len\(\) \+ stored/error.len() \/ 1000 + stored/@semel@test(=machine::tests::settles::texts_and_stored_data_count_toward_the_size_of_a_batch)
open-transaction@semel-store/src/tx.rs@s/BEGIN; SET LOCAL idle_in_transaction_session_timeout = \{idle\}/BEGIN; SET LOCAL idle_in_transaction_session_timeout = 30000/@semel-store@test(=contention::the_server_ends_the_transaction_of_a_frozen_node)
no-limit@semel-store/src/tx.rs@s/let limit = seat\.answer_limit\(\);/let limit = 100 * seat.answer_limit();/g@semel-testkit@test(=cuts::a_connection_that_swallows_everything_is_given_up)
sleepwalker@semel/src/run/course.rs@s/if self\.remaining\(\)\.is_zero\(\) \{/if self.remaining().is_zero() \&\& self.operation().id == 0 {/@semel-testkit@test(=zombies::sqlite::a_zombie_reports_a_lost_lease_wherever_it_slept)
pinned-purge@semel/src/machine/tend.rs@s/_ if is_final =>/_ if is_final \&\& now.as_micros() < 0 =>/@semel-store@test(=sqlite::pinned::a_pinned_operation_does_not_change_until_its_retention_ends)
pinned-superseded@semel/src/machine/claim.rs@s/if op\.is_final\(now\) \|\| !is_newer/if !is_newer/@semel-store@test(=sqlite::pinned::a_pinned_operation_does_not_change_until_its_retention_ends)
pinned-postgres@semel-store/src/postgres/inserts.rs@s/\|r\| r\.policy\.pinned/|_| false/@semel-store@test(=histories::prop_postgres_agrees_with_the_machine)
pinned-sqlite@semel-store/src/sqlite/inserts.rs@s/json!\(policy\.pinned\)/json!(false)/@semel-store@test(=histories::prop_sqlite_agrees_with_the_machine)
remember-anything@semel/src/replays.rs@s/!operation\.is_final\(read_at\) \|\| //@semel-store@test(=sqlite::pinned::an_unpinned_operation_is_never_replayed_from_memory)
never-forget@semel/src/replays.rs@s/\|until\| until <= now/|_| false/@semel-store@test(=sqlite::pinned::a_pinned_outcome_is_forgotten_with_its_retention)
remember-archived@semel/src/replays.rs@s/\.chain\(operation\.archive_at\)//@semel-store@test(=sqlite::pinned::a_pinned_outcome_is_forgotten_with_its_retention)
due-exhausted@semel/src/machine/mod.rs@s/op\.parked \|\| terms\.is_some_and\(.*?\);/op.parked;/@semel-store@test(=sqlite::due::an_operation_that_waits_for_a_person_is_never_due)
due-tended@semel-store/src/apply.rs@s/old\.fence == op\.fence && old\.order == op\.order &&/old.fence != op.fence \&\& old.order == op.order \&\&/@semel-store@test(=sqlite::due::an_operation_that_waits_for_a_person_is_never_due)
due-newer@semel-store/src/apply.rs@s/old\.fence == op\.fence && old\.order == op\.order &&/old.fence == op.fence \&\&/@semel-store@test(=sqlite::enqueue::newer_data_replaces_pending_data)
due-for-ever@semel-store/src/take.rs@s/applied\.answer == Answer::Exhausted\)/applied.answer == Answer::Busy)/@semel-store@test(=sqlite::due::an_operation_exhausted_under_a_stricter_policy_is_no_longer_due)
take-apart@semel-store/src/take.rs@s/Err\(error\) if !error\.is_transient\(\) && !picked\.is_empty\(\) => self/Err(error) if !error.is_transient() \&\& picked.len() > 1000 => self/@semel-store@test(=sqlite::working::an_operation_that_cannot_be_claimed_blocks_no_other)
handed-not-stored@semel/src/atomic.rs@s/Fate::RolledBack\(write\) => Effect::RolledBack\(write, Handed::NotStored\)/Fate::RolledBack(write) => Effect::RolledBack(write, Handed::Stored(value))/@semel-store@test(=sqlite::commits::a_transient_commit_failure_counts_no_attempt)
worker-newer-seat@semel/src/run/course.rs@s/if successor && !by_worker \{/if successor \&\& !(by_worker \&\& ledger.is_stopping()) {/@semel-store@test(=sqlite::working::newer_data_is_the_workers_next_work)
since-without-grace@semel-store/src/look.rs@s/micros\(GRACE\)/micros(GRACE - GRACE)/@semel-store@test(=postgres::looking::filters_hold_together)
decision-audit@semel-store/src/batch.rs@s/\(action, rows\.get\(&id\)\) \{/(action.filter(|_| id < 0), rows.get(\&id)) {/@semel-store@test(=sqlite::lost::a_persons_decision_is_audited)
flush-alone@semel/src/repeats.rs@s/let _writing = self\.writing\.lock\(\)\.await;//@semel-store@test(=sqlite::story::a_flush_ends_after_the_one_before_it)
commit-trouble@semel/src/atomic.rs@s/Ended::Unavailable\(why\) => Ok\(Fate::RolledBack\(self\.transient_failure\(late, &why\)\)\)/Ended::Unavailable(why) => Ok(Fate::RolledBack(rolled_back(\&why)))/@semel-store@test(=sqlite::commits::a_transient_commit_failure_counts_no_attempt)
relay-renews@semel/src/messaging/relay/keeper.rs@s/\(batch\.leased \+ round\)\.has_passed\(\)/(batch.leased + round * 1000).has_passed()/@semel-testkit@test(=messaging::relay::postgres::a_confirmation_after_three_leases_is_published_once)
queue-renews@semel-store/src/messaging/unacked.rs@s/\(held\.leased \+ round\)\.has_passed\(\)/(held.leased + round * 100_000).has_passed()/@semel-store@test(=sqlite::queues::a_delivered_message_is_renewed_while_it_is_handled)
hold-token@semel-store/src/messaging/sql.rs@s/(macro_rules! hold \{.*?)WHERE \(h\.id, h\.token\) IN \(SELECT r\.id, r\.token FROM/$1WHERE h.id IN (SELECT r.id FROM/s@semel-store@test(=postgres::outbox::a_lease_is_renewed_by_its_own_token_only)
hold-locked@semel-store/src/messaging/sql.rs@s/(macro_rules! hold \{.*?)WHERE id \{unlocked SELECT h\.id FROM "(.*?AS r\))\}/$1WHERE id IN (SELECT h.id FROM "$2)/s@semel-store@test(=postgres::outbox::a_locked_row_blocks_no_renewal)
mark-token@semel-store/src/messaging/sql.rs@s/WHERE o\.id = r\.id AND o\.token = r\.token/WHERE o.id = r.id/; s/WHERE o\.id = a\.id AND o\.token = a\.token/WHERE o.id = a.id/@semel-store@test(=postgres::outbox::an_expired_lease_is_taken_again)
retry-token@semel-store/src/messaging/sql.rs@s/DELETE FROM semel_retries WHERE id = \$1 AND token = \$2/DELETE FROM semel_retries WHERE id = \$1 AND CAST(\$2 AS BIGINT) > 0/@semel-store@test(=postgres::letters::an_old_token_ends_no_retry)
queue-lost@semel-store/src/messaging/unacked.rs@s/if ours\.contains\(&row\.0\) \{/if ours.contains(\&row.0) || row.0 > 0 {/@semel-store@test(=sqlite::queues::a_message_taken_by_another_consumer_is_lost_and_not_renewed)
lost-begun@semel/src/messaging/consumer/fresh.rs@s/let lost = acknowledge\.is_lost\(\);/let lost = acknowledge.is_lost() \&\& message.queue.is_empty();/@semel-testkit@test(=messaging::consumer::sqlite::a_delivery_taken_by_another_consumer_is_not_begun)
inbox-settled@semel/src/messaging/inbox.rs@s/Some\(Claim::InDoubt\(_\)\) => Once::NotSettled\(Unsettled::InDoubt\)/Some(Claim::InDoubt(_)) => Once::Done/@semel-store@test(=sqlite::inline::an_inbox_distinguishes_effects_from_unsettled_operations)
own-trouble@semel/src/messaging/consumer/fault.rs@s/self\.strikes >= MOST_STRIKES/self.strikes >= MOST_STRIKES * 1000/@semel-testkit@test(=messaging::away::sqlite::a_message_whose_commit_always_fails_transiently_becomes_a_dead_letter)
store-trouble@semel/src/messaging/consumer/fault.rs@s/match was_run && store_answers \{/match was_run || store_answers {/@semel@test(=messaging::consumer::fault::tests::failures_without_a_run_or_a_store_answer_are_not_the_messages_fault)
webhook-commit-trouble@semel-server/src/services/webhooks/process.rs@s/\(Ran::Released, Handed::NotStored\) => \{/(Ran::Released, Handed::NotStored) if job.event.id.is_empty() => {/@semel-server@test(=webhooks_trouble::a_deadlock_at_the_commit_counts_no_attempt)
webhook-turns@semel/src/worker/shares.rs@s/self\.turns\.get\(&kind\)\.cloned\(\)\.unwrap_or_default\(\)/Pair::default()/@semel-server@test(=webhooks_worker::sqlite::a_function_with_a_long_backlog_blocks_no_other)
webhook-share@semel/src/worker/shares.rs@s/free\.div_ceil\(left\)/free.div_ceil(1 + left - left)/@semel-server@test(=webhooks_worker::sqlite::a_slow_function_leaves_seats_for_others)
webhook-tenant@semel-server/src/services/webhooks/work.rs@s/tenant == taken\.config\.tenant/tenant.len() < 65 \&\& !taken.config.tenant.is_empty()/@semel-server@test(=webhooks_worker::sqlite::events_of_another_tenant_are_left_alone_and_delay_no_other)
webhook-away@semel-server/src/services/webhooks/process.rs@s/Err\(Unfinished::Away \{ target: caller\.target\(\), after: later, why \}\)/Err(Unfinished::failed(why))/@semel-server@test(=webhooks_worker::sqlite::an_unreachable_endpoint_is_paused_and_counts_no_attempt)
webhook-function@semel-server/src/services/webhooks/source.rs@s/functions\.0\.is_empty\(\) \|\| self\.names/functions.0.len() < 1000 || self.names/@semel-server@test(=webhooks_refused::sqlite::a_function_that_the_source_does_not_have_is_refused)
webhook-address@semel-server/src/services/webhooks/receive.rs@s/peer\.is_some_and/peer.is_none_or/@semel-server@test(=webhooks_refused::sqlite::a_sender_of_unknown_address_is_not_this_machine)
webhook-hold-and-wait@semel-server/src/http/room.rs@s/let more = (self\.all\.clone\(\)\.try_acquire_many_owned\(permits\(needed - taken\)\))\.map_err\(\|_\| NoRoom\)\?;/let more = loop { match $1 { Ok(more) => break more, Err(_) => std::thread::sleep(std::time::Duration::from_millis(5)) } };/@semel-server@test(=webhooks_room::sqlite::a_body_that_gets_no_more_room_is_refused_at_once)
webhook-tolerance@semel-http/src/webhooks/verifier.rs@s/near if near <= tolerance => \{\}/near if near <= u64::MAX => {}/@semel-http@test(=webhooks_headers::the_tolerance_is_exact_for_old_and_for_future_timestamps)
webhook-first-secret@semel-http/src/webhooks/verifier.rs@s/self\.keys\.iter\(\)\.position\(fits\)/self.keys.iter().take(1).position(fits)/@semel-http@test(=webhooks_headers::all_secrets_are_tried_and_the_matching_one_is_reported)
webhook-counts@semel-server/src/services/webhooks/event/read.rs@s/&\["\/pending_webhooks"\]/\&[]/@semel-server@test(=webhooks::sqlite::a_changed_delivery_count_is_no_conflict)
log-failed-run@semel/src/ledger.rs@s/log::settled\(operation, &write\.write\);/drop(operation.short_hash());/@semel-server@test(=log_lines::sqlite::a_failed_run_is_one_line_that_names_source_event_attempt_and_error)
log-lost-lease@semel-store/src/apply.rs@s/        self\.log_expired_leases\(\);\n//@semel-server@test(=log_lines::sqlite::a_lost_lease_is_one_line_of_the_node_that_finds_it)
log-span@semel/src/run/course.rs@s/tokio::spawn\(task\.in_current_span\(\)\)/tokio::spawn(task.instrument(tracing::Span::none()))/@semel-server@test(=log_lines::sqlite::a_failed_run_is_one_line_that_names_source_event_attempt_and_error)
released-why@semel/src/machine/settle.rs@s/        op\.error = Some\(why\.to_owned\(\)\);\n//@semel-server@test(=log_lines::sqlite::an_unreachable_endpoint_is_shown_by_the_event_its_attempt_and_the_log)
counted-superseded@semel-store/src/apply.rs@s/Write::Complete\(_\), \.\. \} => Some\(State::Completed\)/Write::Complete(_), .. } => None/@semel-store@test(=sqlite::counters::a_run_that_ended_while_newer_data_waited_is_counted_by_its_end) | test(=postgres::counters::a_run_that_ended_while_newer_data_waited_is_counted_by_its_end)
webhook-rerun-fence@semel-store/src/again.rs@s/expected: Some\(fence\) \}/expected: Some(fence).filter(|_| id == 0) }/@semel-server@test(=webhooks_stored::sqlite::concurrent_retries_of_one_event_run_it_once)
webhook-rerun-named@semel-server/src/services/webhooks/again.rs@s/if was != Some\(result\) \{/if was != Some(result) \&\& result.is_empty() {/@semel-server@test(=webhooks_stored::sqlite::a_completed_event_runs_again_only_if_its_result_is_named)
webhook-rerun-archive@semel/src/machine/tend.rs@s/            if op\.archived \{/            if op.archived && archived.is_none() {/@semel-server@test(=webhooks_stored::sqlite::an_archived_event_runs_with_the_data_that_it_came_with)
webhook-reprocess-bound@semel-server/src/services/webhooks/reprocess.rs@s/if done == AT_ONCE \{/if done > PASSED as usize {/@semel-server@test(=webhooks_stored_job::sqlite::a_job_whose_node_is_killed_midway_runs_each_event_once)
webhook-failing-rule@semel-server/src/services/webhooks/monitor.rs@s/group: &\|event\| source\.config\.handlers\.place\(event\.labels\.0\[0\]\.as_deref\(\)\.unwrap_or_default\(\)\),/group: \&|_| None,/@semel-server@test(=webhooks_stored::sqlite::an_unreachable_endpoint_is_reported_despite_effects_of_other_rules)
webhook-digits@semel-server/src/services/webhooks/event/strict.rs@s/of_json_by_digits\(body, without\)/of_json_without(body, without).or_else(|_| Ok::<_, semel::JsonError>(Fingerprint::of_bytes(body)))/@semel-server@test(=webhooks::sqlite::a_changed_delivery_count_is_no_conflict)
webhook-newer-seat@semel-server/src/services/webhooks/process.rs@s/_seat: seat \}/_seat: seat.filter(|_| false) }/@semel-server@test(=webhooks_seats::sqlite::newer_data_that_waited_keeps_the_seat_of_the_older)
webhook-line@semel/src/worker/rounds.rs@s/if !std::mem::replace\(&mut self\.in_line\[n\], true\) \{/if !std::mem::replace(\&mut self.in_line[n], true) \&\& kind.service.is_empty() {/@semel-server@test(=webhooks_seats::sqlite::due_events_get_seats_under_a_stream_of_deliveries)
webhook-room@semel-server/src/services/webhooks/source.rs@s/let room = Arc::new\(Semaphore::new\(ROOM\)\);/static ALL: std::sync::OnceLock<Arc<Semaphore>> = std::sync::OnceLock::new();\n        let room = ALL.get_or_init(|| Arc::new(Semaphore::new(ROOM))).clone();/@semel-server@test(=webhooks_room::sqlite::a_full_source_blocks_no_other)
webhook-at-once@semel-server/src/services/webhooks/source.rs@s/\n\s+\.at_once\(\);/;/@semel-server@test(=webhooks_failing::sqlite::a_redelivery_does_not_wait_for_the_backoff)
webhook-second-key@semel-server/src/services/webhooks/bodies.rs@s/if !source\.config\.id_can_be_forged\(\) \{/if !source.config.id_can_be_forged() || !event.id.is_empty() {/@semel-server@test(=webhooks_forged::sqlite::the_body_of_a_failed_event_is_not_accepted_under_another_id)
webhook-forged-newer@semel-server/src/services/webhooks/take_in.rs@s/bodies::has\(&known, event\)/(bodies::has(\&known, event) || !event.id.is_empty())/@semel-server@test(=webhooks_forged::sqlite::the_body_of_another_event_supersedes_nothing)
webhook-seen-pair@semel-server/src/services/webhooks/take_in.rs@s/bodies::has\(&known, event\)/(bodies::has(\&known, event) || !event.id.is_empty())/@semel-server@test(=webhooks_sources::sqlite::the_body_of_another_event_under_a_known_id_is_a_duplicate)
webhook-topic@semel-server/src/services/webhooks/bodies.rs@s/Key::new\(&body_hash\(&event\.body\)\)/Key::new(\&format!("{} {}", event.kind, body_hash(\&event.body)))/@semel-server@test(=webhooks_sources::sqlite::another_unsigned_topic_is_not_another_event)
webhook-came-right@semel-server/src/services/webhooks/monitor.rs@s/it\.is_undecided\(\) && !settled\(it\)/!it.event_id.is_empty() || settled(it) || it.is_undecided()/@semel-server@test(=webhooks_monitor_health::sqlite::settled_conflicts_are_not_reported)
webhook-out-of-date@semel-server/src/services/webhooks/monitor.rs@s/ && !settled\(it\)/ || settled(it)/@semel-server@test(=webhooks_monitor_health::sqlite::two_versions_of_the_same_age_are_reported)
webhook-few-conflicts@semel-server/src/services/webhooks/monitor.rs@s/const MOST_CONFLICTS: usize = 500/const MOST_CONFLICTS: usize = MOST_LISTED/@semel-server@test(=webhooks_monitor_health::sqlite::open_conflicts_are_reported_among_many_settled_ones)
webhook-secret@semel-server/src/services/webhooks/config/mod.rs@s/for mistake in self\.secrets\.mistakes\(&self\.kind\) \{/for mistake in self.secrets.mistakes(\&self.kind).into_iter().filter(|_| name.is_empty()) {/@semel-server@test(=webhooks_config::no_server_starts_with_a_secret_that_is_easy_to_guess)
webhook-variable@semel-server/src/services/webhooks/config/secrets.rs@s/if is_variable\(own\) \{/if is_variable(own) \&\& own.is_empty() {/@semel-server@test(=webhooks_config::no_server_starts_with_a_secret_that_is_easy_to_guess)
webhook-retry-after@semel-server/src/services/webhooks/deliver.rs@s/\n\s+\.retry_after\(Duration::from_secs\(1\)\);/;/@semel-server@test(=webhooks_crash_store::a_delivery_that_cannot_be_stored_is_answered_503) | test(=webhooks_forged::sqlite::a_delivery_that_died_midway_is_accepted_when_it_is_sent_again) | test(=webhooks_trouble::a_statement_that_timed_out_counts_no_attempt)
look-retry-after@semel-server/src/http/problem.rs@s/Problem::new\(&STORE_UNAVAILABLE\)\.retry_after\(SOON\)/Problem::new(\&STORE_UNAVAILABLE)/@semel-server@test(=webhooks_crash_store::a_delivery_that_cannot_be_stored_is_answered_503)
http-retry-after@semel-http/src/serve.rs@s/\.retry_after\(later\.retry_after\)//@semel-http@test(=verdicts::sqlite::a_failure_backs_off_and_is_tried_again)
http-store-retry-after@semel-http/src/refusal.rs@s/if kind\.retryable \{ problem\.retry_after\(SOON\) \}/if kind.name.is_empty() { problem.retry_after(SOON) }/@semel-http@test(=kill_store::requests_to_a_killed_store_are_503_and_run_nothing)
slow-head@semel-server/src/serve.rs@s/\.header_read_timeout\(limits\.head\)/.header_read_timeout(None)/@semel-server@test(=connections::an_incomplete_request_head_times_out) | test(=connections::an_incomplete_request_head_times_out_at_the_gateway)
long-head@semel-server/src/serve.rs@s/\.max_header_size\(LONGEST_HEAD\)/.max_header_size(8 * LONGEST_HEAD)/@semel-server@test(=connections::a_request_head_over_64_kib_is_refused)
connections@semel-server/src/serve.rs@s/Seats::new\(limits\.connections\)/Seats::new(limits.connections + 100)/@semel-server@test(=connections::a_connection_over_the_limit_waits_and_is_then_served) | test(=connections::the_number_of_connections_never_exceeds_the_limit)
full-stop@semel-server/src/serve.rs@s/let seat = tokio::select! \{.*?\};/let seat = seats.take().await;/s@semel-server@test(=connections::a_server_without_free_connections_stops_on_request)
tunnel-seat@semel-server/src/gateway/tunnel.rs@s/let _seat = seat;/drop(seat);/@semel-server@test(=connections::an_upgraded_connection_counts_toward_the_limit)
gateway-two-lengths@semel-server/src/gateway/framing.rs@s/if bodiless \|\| headers\.contains_key\(header::TRANSFER_ENCODING\)/if bodiless/@semel-server@test(=gateway_hostile::an_answer_with_two_lengths_cannot_be_split_in_two)
gateway-bad-coding@semel-server/src/gateway/framing.rs@s/if has_strange_coding\(headers\) \{/if has_strange_coding(headers) && bodiless {/@semel-server@test(=gateway_hostile::an_answer_that_breaks_the_rules_is_a_bad_gateway_and_leaves_its_key_in_doubt)
gateway-status-class@semel-server/src/gateway/proxy.rs@s/_ if status\.as_u16\(\) >= 500 => self\.unknown\(\),/_ if status.is_server_error() => self.unknown(),\n            _ if status.as_u16() >= 600 => Verdict::Fail,/@semel-server@test(=gateway_hostile::a_request_answered_with_an_unknown_status_class_is_executed_once)
http-status-class@semel-http/src/caller.rs@s/500\.\.=599 => Self::Fail,\n            _ => Self::Doubt/_ => Self::Fail/@semel-http@test(=verdicts::sqlite::a_status_of_no_known_class_is_in_doubt)
gateway-methods@semel-http/src/route.rs@s/    !REPEATABLE\.contains\(method\)/    !REPEATABLE.contains(method) && [Method::POST, Method::PATCH].contains(method)/@semel-server@test(=gateway_hostile::unknown_and_misspelt_methods_respect_their_key)
strange-coding-close@semel-server/src/serve/framing.rs@s/        refused\.headers_mut\(\)\.insert\(header::CONNECTION[^;]*;\n//@semel-server@test(=gateway_hostile::a_refused_transfer_coding_ends_its_connection)
body-budget@semel-server/src/http/room.rs@s/let grown = taken\.room\.grow\(beyond\);/let grown = Ok(());/@semel-server@test(=room::stalled_bodies_take_no_more_of_a_gateway_than_its_budget)
body-room-of-the-gone@semel-server/src/http/room.rs@s/        head\.extensions\.insert\(held\.clone\(\)\);\n//@semel-server@test(=http::room::tests::work_that_outlives_its_client_keeps_its_room)
credentials@semel-http/src/ask.rs@s/\|\(own, first\)\| own != first/|(own, first)| own.len() != first.len()/@semel-http@test(=credentials::sqlite::a_repeat_with_other_credentials_is_neither_carried_out_nor_replayed)
credentials-counted@semel-http/src/claim.rs@s/\.then_some\("credentials_differ"\)/.then_some("credentials_differ").filter(|_| false)/@semel-http@test(=credentials::sqlite::a_repeat_that_is_refused_for_its_credentials_is_counted_as_such)
cut-off-in-doubt@semel-http/src/run.rs@s/NODE_STOPPED => \(&problem::IN_DOUBT/NODE_STOPPED => (&problem::INTERNAL/@semel-http@test(=trouble::sqlite::a_stop_does_not_wait_for_ever)
credentials-come-first@semel-http/src/ask.rs@s/if self\.differs_from\(there\)/if matches!(claim, Claim::Acquired(_) | Claim::Replay(_)) \&\& self.differs_from(there)/@semel-http@test(=credentials::sqlite::another_caller_learns_nothing_of_a_request_in_flight_or_in_doubt)
gateway-retention@semel-server/src/gateway/config.rs@s/!\(SHORTEST_RETENTION\.\.=Policy::LONGEST\)\.contains\(&gateway\.retention\)/gateway.retention > Policy::LONGEST/@semel-server@test(=gateway_credentials::settings_without_protection_are_refused_with_the_reason)
given-twice@semel-server/src/http/json.rs@s/twice = !names\.insert\(name\.clone\(\)\);/twice = !names.insert(name.clone()) \&\& name.is_empty();/@semel-server@test(=services::notifications::reading::tests::an_ambiguous_member_is_refused_by_name)
json-depth@semel-server/src/http/json.rs@s/if levels\.len\(\) == deepest/if levels.len() == usize::MAX/@semel-server@test(=notifications_lists::sqlite::a_payload_that_some_json_reader_refuses_is_not_accepted)
json-number@semel-server/src/http/json.rs@s/f64::is_infinite/f64::is_nan/@semel-server@test(=notifications_lists::sqlite::a_payload_that_some_json_reader_refuses_is_not_accepted)
json-surrogate@semel-server/src/http/json.rs@s/twice \|\| has_lone_surrogate\(quoted\)/twice || (quoted.is_empty() \&\& has_lone_surrogate(quoted))/@semel-server@test(=notifications_lists::sqlite::a_payload_that_some_json_reader_refuses_is_not_accepted)
gateway-trailers@semel-server/src/gateway/trailers.rs@s/if frame\.is_trailers\(\) => /if frame.is_trailers() \&\& frame.is_data() => /@semel-server@test(=gateway_trailers::trailers_of_an_upstream_are_not_passed_on)
gateway-trailer-header@semel-http/src/headers.rs@s/    header::TRAILER,\n/    header::TE,\n/@semel-server@test(=gateway_trailers::trailers_of_a_client_are_not_passed_on)
cookie-readings@semel-http/src/cookies.rs@s/\(!agreed\)\.then_some\(all\)/(!agreed \&\& line.is_empty()).then_some(all)/@semel-http@test(=credentials::tests::cookies_that_some_server_reads_differently_have_different_marks)
cookie-fields@semel-http/src/serve.rs@s/        if self\.route\.credentials\.is_some\(\) \{\n/        if self.route.credentials.is_some() \&\& self.route.strict {\n/@semel-server@test(=gateway_credentials::sqlite::several_cookie_fields_reach_the_upstream_as_one)
log-upstream-key@semel-server/src/gateway/proxy.rs@s/let key = attempt\.map\(Attempt::short_hash\);/let key = attempt.map(|_| String::new());/@semel-server@test(=log_lines::sqlite::a_missing_upstream_answer_is_logged_with_the_key_and_the_story_has_the_request)
log-dead-attempt@semel/src/messaging/consumer/letters.rs@s/let attempt = Some\(attempt\)\.filter\(\|attempt\| \*attempt > 0\);/let attempt = Some(attempt).filter(|attempt| *attempt > 1_000);/@semel-server@test(=log_lines::sqlite::a_message_out_of_attempts_is_logged_with_the_attempt_and_the_error)
log-newer-data@semel/src/run/course.rs@s/return log::newer_data_not_run\(&operation, &error\)/return tracing::warn!(%error, "newer data could not be run to its end")/@semel-server@test(=log_lines::sqlite::newer_data_that_cannot_be_settled_is_logged_with_the_event_and_the_key)
log-bytes@semel-server/src/services/webhooks/take_in.rs@s/bodies::end\(bytes, stored\)\.instrument\(span\(source, &event\.id, &event\.kind\)\)/bodies::end(bytes, stored)/@semel-server@test(=log_lines::sqlite::a_body_claim_that_cannot_be_settled_is_logged_with_the_event_and_the_key)
killed-listener@semel-server/src/services/messages/config.rs@s/lease: relay\.lease,/lease: 6 * relay.lease,/@semel-server@test(=notifications_crash_node::the_messages_of_a_killed_listener_come_again_within_seconds)
killed-retry@semel-server/src/services/messages/config.rs@s/            lease: self\.lease,/            lease: 6 * self.lease,/@semel-server@test(=notifications_crash_node::the_retry_of_a_killed_node_runs_again_within_seconds_with_the_embedded_queue)
message-member@semel-server/src/services/notifications/message.rs@s/wrong_member\(&members\)\.unwrap_or_else/wrong_member(\&members).filter(|_| bytes.is_empty()).unwrap_or_else/@semel-server@test(=services::notifications::message::tests::a_missing_or_mistyped_member_is_named_without_its_value)
webhook-forged-type@semel-server/src/services/webhooks/deliver.rs@s/if same \{ event \}/if same || !event.id.is_empty() { event }/@semel-server@test(=webhooks_forged::sqlite::a_redelivery_runs_with_the_type_and_function_of_the_first_delivery)
webhook-trouble@semel-server/src/services/webhooks/process.rs@s/Err\(Stopped::Broken\(error\)\) if error\.is_transient\(\) =>/Err(Stopped::Broken(error)) if error.is_transient() \&\& self.event.id.is_empty() =>/@semel-server@test(=webhooks_trouble::a_file_locked_by_another_process_counts_no_attempt)
webhook-conflict@semel-server/src/services/webhooks/take_in.rs@s/self\.note_conflict\(source, event, stored, false, true\)\.await\?;//@semel-server@test(=webhooks::sqlite::newer_data_is_processed_and_older_is_not)
webhook-not-stored@semel-server/src/services/webhooks/deliver.rs@s/match self\.take_in\(&source, &event\)\.await\.map_err\(not_stored\)\? \{/match self.take_in(\&source, \&event).await.unwrap_or(Err(Status::Accepted)) {/@semel-server@test(=webhooks_crash_store::a_delivery_that_cannot_be_stored_is_answered_503)
webhook-key@semel-server/src/services/webhooks/handler.rs@s/context\.operation\(\)\.fingerprint\.to_hex\(\)/context.fence()/@semel-server@test(=webhooks_crash::sqlite::a_server_dies_at_every_point_of_forwarding)
webhook-key-of-data@semel-server/src/services/webhooks/handler.rs@s/context\.operation\(\)\.fingerprint\.to_hex\(\)/context.operation().id/@semel-server@test(=webhooks_failing::sqlite::newer_data_is_forwarded_under_its_own_key)
webhook-given-up@semel-store/src/take.rs@s/applied\.answer == Answer::Exhausted\)/applied.answer == Answer::Busy)/@semel-server@test(=webhooks_crowd::sqlite::exhausted_events_do_not_block_others)
webhook-no-pause@semel-server/src/services/webhooks/process.rs@s/wait\.map_or\(later, \|wait\| wait\.max\(later\)\)/wait.unwrap_or(later)/@semel-server@test(=webhooks_failing::sqlite::a_busy_endpoint_is_left_alone_for_at_least_ten_seconds)
webhook-lease-lost@semel-server/src/services/webhooks/deliver.rs@s/Ran::LeaseLost => Ok\(Status::Rejected\)/Ran::LeaseLost => Ok(Status::Processed)/@semel-server@test(=webhooks_crash_pauses::sqlite::a_server_suspended_after_a_call_completes_nothing_late)
sqlite-turns@semel-store/src/sqlite/turns.rs@s/let file = self\.file\.clone\(\)\?;/let file = self.file.clone().filter(|_| false)?;/@semel-store@test(=sqlite::turns::tests::a_turn_ends_while_another_waits)
sqlite-frozen-clock@semel-store/src/sqlite/held.rs@s/= \(9, 10\);/= (0, 10);/@semel-store@test(=sqlite_clock::leases_expire_after_a_clock_that_was_ahead_came_back)
sqlite-forgotten-boot@semel-store/src/sqlite/held.rs@s/&& boot_id == clock\.boot_id/\&\& boot_id != clock.boot_id/@semel-store@test(=sqlite_clock::time_that_is_ahead_passes_also_while_no_process_has_the_file_open)
sqlite-repair-leased@semel-store/src/sqlite/repair.rs@s/        if n > 0 \{/        if n > 1000 {/@semel-store@test(=sqlite_clock::a_repair_sets_the_time_back_to_the_hosts_clock_and_is_audited)
sqlite-long-log@semel-store/src/sqlite/checkpoint.rs@s/if size < LONG \|\|/if size < 100 * LONG ||/@semel-store@test(=sqlite_log::the_log_stays_bounded_under_constant_reads)
sqlite-lost-log@semel-store/src/sqlite/watch.rs@s/identity\(path\) != Some\(\*known\)/identity(path) != Some(*known) \&\& known.0 == u64::MAX/@semel-store@test(=sqlite_log::a_log_that_is_deleted_under_its_process_is_noticed_and_nothing_committed_is_lost)
sqlite-no-mark@semel-store/src/sqlite/mod.rs@s/        file::check_mark\(&path\)\?;\n//@semel-store@test(=sqlite_log::a_database_deleted_while_open_is_not_created_again_after_a_clean_stop)
sqlite-blind-stop@semel-store/src/sqlite/writer.rs@s/writer\.rescue\(&lost\)\.await;(\s+\}\s+let Some)/$1/@semel-store@test(=sqlite_log::a_database_deleted_while_open_is_not_created_again_after_a_clean_stop)
sqlite-no-rescue@semel-store/src/sqlite/writer.rs@s/            writer\.rescue\(&lost\)\.await;(\s+return Err)/$1/@semel-store@test(=sqlite_log::a_log_that_is_deleted_under_its_process_is_noticed_and_nothing_committed_is_lost)
unread-outbox@semel-store/src/messaging/outbox.rs@s/        self\.put_aside_outbox\(unread\)\.await;\n/        drop(unread);\n/@semel-store@test(=sqlite::outbox::an_unreadable_row_is_parked_and_blocks_no_other)
unread-queue@semel-store/src/messaging/deliveries.rs@s/unread\.is_empty\(\) \|\| self\.put_aside\(unread\)\.await/unread.is_empty() || unread.len() < usize::MAX/@semel-store@test(=sqlite::queues::a_message_that_cannot_be_read_becomes_a_dead_letter)
unread-another@semel-store/src/codec.rs@s/if \*why == ANOTHER\)/if why.is_empty())/@semel-store@test(=sqlite::queues::a_message_of_another_version_is_postponed_and_no_dead_letter)
unread-letter-key@semel-store/src/messaging/aside.rs@s/row:\{\}:\{\}", row\.id, row\.token/row:{}", row.id/@semel-store@test(=sqlite::queues::reused_row_ids_lose_no_letter)
unread-pause@semel-store/src/messaging/deliveries.rs@s/(they are taken again"\);\s*)false/${1}true/@semel-store@test(=sqlite::queues::a_consumer_pauses_while_it_can_put_nothing_aside)
sweep-adrift@semel-store/src/sweep/mod.rs@s/        let result = self\.end_adrift\(now, &mut swept\)\.await;\n        note\(&mut swept, "missing leases", result\);\n//@semel-store@test(=sqlite::sweeping::an_operation_whose_lease_is_missing_ends_in_doubt)
repeats-of-the-gone@semel-store/src/postgres/hot.rs@s/ FOR KEY SHARE SKIP LOCKED//@semel-store@test(=contention::a_repeat_that_is_added_during_a_purge_leaves_no_row) | test(=removals::a_repeat_that_is_added_during_a_claim_in_place_of_it_leaves_no_row) | test(=removals::a_repeat_added_during_the_release_of_a_first_run_leaves_no_row) | test(=removals::a_purge_waits_for_repeats_that_are_being_added)
repeats-of-the-locked@semel/src/repeats.rs@s/self\.keep\(parts, &left\);/self.keep(parts, \&left[..0]);/@semel-store@test(=removals::repeats_of_a_locked_operation_are_kept_for_the_next_flush)
notes-of-the-gone@semel-store/src/postgres/hot.rs@s/\n    FOR KEY SHARE OF o SKIP LOCKED//@semel-store@test(=removals::a_note_that_is_written_during_a_purge_leaves_no_row)
sqlite-held-in-turn@semel-store/src/sqlite/queue.rs@s/now > since \+ PATIENCE && now > begun \+ ONCE_MORE/now > begun + PATIENCE/; s/self\.is_given_up\(\) &&/arrived.elapsed() > 100 * PATIENCE \&\&/@semel-store@test(=sqlite_held::many_callers_get_an_error_within_seconds_while_another_process_holds_the_file)
sqlite-lost-waits@semel-store/src/connection.rs@s/FILE_LOST \| FILE_HELD/FILE_HELD/@semel-store@test(=sqlite_held::a_deleted_log_is_reported_at_once)
sqlite-log-alone@semel-store/src/sqlite/mod.rs@s/        file::check_log\(&path\)\?;\n//@semel-store@test(=opening::a_log_without_its_database_is_refused_and_left_as_it_is)
sqlite-emptied@semel-store/src/sqlite/watch.rs@s/        if file::is_missing_or_empty\(&self\.database\) \{\n            return Some\(&self\.database\);\n        \}\n//@semel-store@test(=sqlite_log::a_database_truncated_while_open_is_not_created_again)
sqlite-log-repair@semel-store/src/sqlite/repair.rs@s/    file::check_log\(&path\)\?;\n//@semel-store@test(=opening::a_log_without_its_database_is_refused_and_left_as_it_is)
sqlite-own-locks@semel-store/src/sqlite/file.rs@s/create_new\(true\)\.write\(true\)/create(true).append(true)/@semel-store@test(=opening::a_second_opening_in_one_process_keeps_the_locks_of_the_first)
sweep-adrift-stuck@semel-store/src/sweep/adrift.rs@s/(            self\.edges\(\)\.looked_adrift\(lap\.at\(\)\);\n)(            self\.end_each\(look\.adrift, swept\)\.await\?;\n)/$2$1/@semel-store@test(=sqlite::aside::missing_leases_are_found_among_many_and_after_rows_that_are_refused)
sqlite-mode@semel-store/src/sqlite/mod.rs@s/        file::make_private\(&path\);\n//@semel-store@test(=opening::the_files_of_a_new_database_are_their_owners_alone)
sqlite-no-close@semel-store/src/condition.rs@s/Inner::Sqlite\(db\) => db\.close\(\)\.await,/Inner::Sqlite(_) => {}/@semel-store@test(=sqlite_log::after_the_last_process_has_closed_it_the_file_alone_is_the_database)
ready-to-read@semel-server/src/node/ready.rs@s/match self\.store\.check_writes\(\)\.await \{/match semel::Result::Ok(()) {/@semel-server@test(=ready::a_node_whose_disk_is_full_is_not_ready_until_there_is_room) | test(=ready::a_node_whose_postgres_takes_no_writes_is_not_ready_until_it_does)
read-only-start@semel-store/src/sqlite/mod.rs@s/        file::prove_writable\(&mut connection\)\.await\.map_err\(cannot\)\?;\n//@semel-server@test(=ready::a_file_or_directory_that_cannot_be_written_is_refused_at_the_start)
many-voices@semel-server/src/log/outage.rs@s/!self\.swallows\(event\)/!self.swallows(event) || event.fields().count() > 0/@semel-server@test(=outage::a_database_outage_is_logged_once_at_its_start_and_once_at_its_end)
aside-halves@semel-store/src/sweep/mod.rs@s/parts\.push\(ids\.split_off\(ids\.len\(\) \/ 2\)\);\s*parts\.push\(ids\);/drop(std::mem::take(\&mut ids)); return Err(error);/@semel-store@test(=sqlite::aside::a_row_that_the_database_refuses_is_set_aside)
aside-bytes@semel-store/src/sweep/mod.rs@s/const BYTES: i64 = 8 << 20/const BYTES: i64 = 8 << 40/@semel-store@test(=sqlite::aside::a_round_is_bounded_in_bytes)
aside-expired@semel-store/src/sweep/aged.rs@s/(let \(sql, sweep\) = \(self\.sql\(\), self\.sweep_sql\(\)\);\n +let mut conn = round\.conn\(\);)/$1\n            crate::apply::load_by_id(\&mut conn, sql, \&locked).await?;/@semel-store@test(=sqlite::aside::a_row_that_cannot_be_read_expires_and_is_archived)
aside-phase@semel-store/src/sweep/mod.rs@s/note\(&mut swept, phase, result\);/let _ = phase; result?;/@semel-store@test(=sqlite::aside::a_failing_phase_blocks_no_other)
aside-blame@semel-store/src/sweep/mod.rs@s/done == 0 && culprits\.len\(\) >= (MOST_CULPRITS|enough)/culprits.len() > 100 * MOST_CULPRITS/g@semel-store@test(=sqlite::aside::a_failing_phase_blocks_no_other)
aside-side-by-side@semel-store/src/sweep/mod.rs@s/one_of_each\(&mut parts, beyond\)/one_of_each(\&mut Vec::new(), beyond)/@semel-store@test(=sqlite::aside::rows_that_are_refused_side_by_side_are_set_aside)
aside-beyond@semel-store/src/sweep/mod.rs@s/found\.last\(\)\.filter\(\|_\| cut\)/found.last().filter(|_| cut \&\& full)/@semel-store@test(=sqlite::aside::large_rows_that_are_refused_side_by_side_are_set_aside)
aside-again@semel-store/src/sweep/mod.rs@s/trouble = Err\(error\);/return Err(error);/@semel-store@test(=removals::a_row_that_always_times_out_blocks_no_other_retry)
aside-renewal@semel-store/src/sqlite/mod.rs@s/(        let there: Vec<\(i64, String, i64, String\)> =)/        load_by_id(\&mut Conn::Sqlite(\&mut *conn), \&self.sql, \&ids).await?;\n$1/@semel-store@test(=sqlite::aside::an_unreadable_operation_blocks_no_renewal)
aside-listing@semel-store/src/rows.rs@s/Ok\(Err\(error\)\) => error\.to_string\(\),/Ok(Err(error)) => return Err(sqlx::Error::Protocol(error.to_string())),/@semel-store@test(=sqlite::aside::a_listing_shows_unreadable_operations)
aside-due@semel-store/src/take.rs@s/self\.set_aside\(Task::Run, &aside, /self.set_aside(Task::Run, \&aside[..0], /@semel-store@test(=sqlite::aside::an_unreadable_due_operation_blocks_no_other)
aside-retry@semel-store/src/sweep/sql.rs@s/ WHERE a\.retry_at <= \$1 ORDER/ WHERE a.retry_at <= \$1 AND a.tries < 0 ORDER/@semel-store@test(=sqlite::aside::an_expired_lease_of_an_unreadable_operation_is_set_aside)
unread-listing@semel-store/src/messaging/unread.rs@s/Ok\(Self \{ id, read \}\)/read.map(|row| Self { id, read: Ok(row) }).map_err(|row| sqlx::Error::Protocol(row.why))/g@semel-store@test(=sqlite::letters::a_page_of_letters_shows_unreadable_ones)
unread-next@semel-store/src/messaging/unread.rs@s/let next = rows\.last\(\)\.filter\(\|_\| more\)/let next = rows.iter().rfind(|row| row.read.is_ok()).filter(|_| more)/@semel-store@test(=sqlite::outbox::a_page_of_the_outbox_shows_unreadable_rows)
unread-column@semel-store/src/messaging/unread.rs@s/read: T::from_row\(row\) /read: Ok(T::from_row(row)?) /@semel-store@test(=sqlite::queues::a_damaged_message_does_not_stop_its_queue)
unread-retry@semel-store/src/messaging/letters.rs@s/tracing::error!\(consumer, row = id, %error, \"a retry cannot be read\"\);/if id > 0 { return Err(error); }/@semel-store@test(=postgres::letters::an_unreadable_retry_blocks_no_other)
unread-turn@semel-store/src/messaging/letters.rs@s/if !any \|\| !rows\.is_empty\(\)/if !any || rows.len() < usize::MAX/@semel-store@test(=sqlite::letters::an_unreadable_retry_blocks_no_other)
unread-starts@semel-store/src/messaging/sql.rs@s/SET due_at = \$2, token = 0, starts = starts - 1/SET due_at = \$2, token = 0/@semel-store@test(=sqlite::letters::an_unreadable_retry_blocks_no_other)
outcome-unknown@semel-server/src/http/problem.rs@s/semel::Error::OutcomeUnknown\(_\) => Problem::new\(&OUTCOME_UNKNOWN\)\.retry_after\(SOON\),//@semel-server@test(=http::problem::tests::a_commit_with_an_unknown_result_is_answered_outcome_unknown)
damaged-after-run@semel-http/src/run.rs@s/Err\(error\) => run_problem\(&error\)/Err(error) => store_problem(\&error)/; s/\{run_problem, store_problem\}/store_problem/@semel-http@test(=trouble::sqlite::a_row_damaged_during_its_run_is_503_outcome_unknown)
own-rows@semel-store/src/connection.rs@s/sqlx::Error::ColumnDecode \{ \.\. \} \| sqlx::Error::Decode\(_\)/sqlx::Error::WorkerCrashed/@semel-store@test(=connection::tests::a_value_of_another_type_is_a_damaged_row_only_in_tables_of_the_store)
result-filters@semel-server/src/services/webhooks/events.rs@s/&& is\(kind, event\.label1\.as_deref\(\)\)\n//@semel-server@test(=services::webhooks::events::tests::a_page_by_result_takes_a_bounded_number_of_statements)
outage-ends@semel-server/src/log/outage.rs@s/good >= GOOD_CHECKS \|\| //@semel-server@test(=log::outage::tests::an_outage_ends_after_consecutive_good_checks_even_if_one_part_still_fails)
edge-floor@semel-store/src/sweep/edges.rs@s/turn\.floor = turn\.from;/turn.floor = i64::MIN;/@semel-store@test(=sweep::edges::tests::a_round_and_a_pass_begin_where_the_last_one_ended)
held-event@semel-server/src/services/notifications/tables/events.rs@s/lock_timeout = '100ms'/lock_timeout = '9s'/@semel-server@test(=notifications_held::an_aggregate_locked_by_another_transaction_blocks_no_other) | test(=notifications_held::an_event_id_held_by_another_transaction_blocks_no_other)
resolved-retention@semel/src/machine/tend.rs@s/op\.expires_at = retention\.map\(\|kept\| now \+ kept\);//; s/Policy \{ retention, tombstone/Policy { retention: retention.filter(|_| false), tombstone/@semel@test(=machine::tests::verdicts::a_resolved_operation_that_was_not_in_doubt_is_kept_for_its_retention)
rerun-story@semel/src/machine/tend.rs@s/notes\.extend\(completed_note\(&op, stored\.fence\)\);/let _ = completed_note(&op, stored.fence);/@semel@test(=machine::tests::verdicts::the_end_of_a_run_is_noted_before_another_run)
advice-password@semel-server/src/cli/ledger.rs@s/let has_password = matches!/let has_password = place.place().is_empty() \&\& matches!/@semel-server@test(=cli::ledger::tests::a_suggested_command_contains_no_password)
rerun-without-rule@semel-server/src/services/webhooks/again.rs@s/if kind\.is_some_and\(\|kind\| source\.stores\(&kind\)\)/if kind.is_some_and(|kind| kind.is_empty() \&\& source.stores(\&kind))/@semel-server@test(=webhooks_stored::sqlite::the_command_line_and_the_routes_refuse_with_the_same_text)
held-first-bytes@semel-server/src/http/held.rs@s/if !self\.begun\n/if !self.begun \&\& self.held.has_stopped()\n/@semel-server@test(=gateway::upstream::tests::a_request_whose_lease_is_lost_before_it_is_written_is_not_sent) | test(=services::call::tests::a_call_whose_lease_is_lost_while_it_connects_is_not_made)
held-no-body@semel-server/src/gateway/upstream.rs@s/held\.check\(\)\.map_err/Held::always().check().map_err/@semel-server@test(=gateway::upstream::tests::a_request_whose_lease_is_lost_before_it_is_written_is_not_sent)
take-paused@semel-store/src/sql/work.rs@s/NOT EXISTS \(SELECT 1 FROM semel_paused AS p WHERE p\.service = \$1 AND p\.kind = \$2\)/TRUE/@semel-store@test(=sqlite::enqueue::a_paused_kind_is_not_taken)
callers-due@semel/src/machine/mod.rs@s/!given_up && !op\.is_left_to_callers\(\)/!given_up/@semel-store@test(=sqlite::remote::an_operation_that_is_left_to_callers_is_never_taken)
callers-terms@semel-store/src/postgres/hot.rs@s/CASE WHEN by_callers THEN terms END/CASE WHEN by_callers AND term < 0 THEN terms END/@semel-store@test(=postgres::remote::an_operation_that_is_left_to_callers_is_never_taken)
claim-token-data@semel/src/machine/claim.rs@s/lease\.token == request\.token\) && op\.fingerprint\.matches\(&request\.fingerprint\)/lease.token == request.token)/@semel@test(=machine::tests::callers::a_token_does_not_get_the_lease_of_other_data)
settle-other@semel/src/machine/settle.rs@s/op\.archived \|\| op\.outcome\.as_ref\(\) == Some\(outcome\)/op.archived || op.outcome.is_some() || outcome.kept/@semel@test(=machine::tests::callers::a_settle_that_says_something_else_than_the_one_before_is_refused)
take-up-to@semel-store/src/take.rs@s/most\.min\(limit\.saturating_sub\(all\)\)/most.min(limit.max(most).saturating_sub(all))/@semel-store@test(=sqlite::remote::a_take_that_is_sent_again_finds_its_leases)
take-lease@semel/src/machine/claim.rs@s/        policy\.lease = lease;\n//@semel@test(=machine::tests::callers::a_worker_may_ask_for_a_longer_lease_than_the_enqueue)
listed-postgres@semel-store/src/postgres/hot.rs@s/a\.service, a\.listed, 'pending'/a.service, a.kind, 'pending'/@semel-server@test(=webhooks_pull::postgres::an_event_waits_for_a_program_whose_complete_takes_effect_once)
listed-sqlite@semel-store/src/sqlite/hot.rs@s/value ->> 2, value ->> 16, 'pending'/value ->> 2, value ->> 3, 'pending'/@semel-server@test(=webhooks_pull::sqlite::an_event_waits_for_a_program_whose_complete_takes_effect_once)
pull-handed-over@semel-server/src/services/webhooks/process.rs@s/if source\.pulls\(&event\.kind\) \{/if source.pulls(\&event.kind) \&\& event.id.is_empty() {/@semel-server@test(=webhooks_pull::sqlite::an_event_stored_under_another_rule_is_handed_over)
verdict-retention@semel/src/machine/tend.rs@s/let retention = op\.terms\.as_ref\(\)\.map_or\(retention, \|own\| own\.retention\);//@semel@test(=machine::tests::callers::a_verdict_keeps_the_retention_of_an_operation_with_a_policy_of_its_own)
enqueue-terms@semel/src/machine/claim.rs@s/own\.runner != Runner::Caller \|\| request/own.max_crashes == 0 \&\& request/@semel-store@test(=sqlite::enqueue::the_policy_of_an_enqueue_is_kept_until_it_settles)
enqueue-wake@semel-store/src/wakes.rs@s/news\.into_iter\(\)\.for_each\(\|news\| self\.wakes\(\)\.wake\(news\)\);/drop(news);/@semel-store@test(=sqlite::working::a_commit_wakes_the_worker)
fleet-limit@semel-store/src/take.rs@s/most = most\.min\(at_once\.saturating_sub\([^;]*;/let _ = (running, at_once);/@semel-store@test(=sqlite::enqueue::the_limits_of_a_kind_are_shared_by_the_fleet)
schedule-mark@semel-store/src/fleet/sql.rs@s/ AND s\.mark = \$11/ AND s.mark <> \$11 + 1/@semel-store@test(=sqlite::schedules::a_run_commits_with_its_mark)
schedule-locked@semel-store/src/fleet/sql.rs@s/\{unlocked SELECT s\.name ([^}]*)\}/IN (SELECT s.name $1)/s@semel-store@test(=postgres::schedules::a_mark_that_another_node_has_locked_is_skipped)
schedule-gap@semel/src/schedule/clock.rs@s/if !self\.fixed \{\n            let next/if true {\n            let next/@semel@test(=schedule::tests::a_gap_brings_no_run_to_a_schedule_of_another_time)
worker-paused-seldom@semel/src/worker/rounds.rs@s/self\.held = \(2 \* self\.held\)\.clamp\(HELD, self\.pause\(\)\.max\(HELD\)\);/self.held = HELD;/@semel-store@test(=sqlite::working::a_paused_kind_is_rarely_polled)
take-followed@semel-store/src/postgres/takes.rs@s/ && !sql\.projections\.follow\(scope\)//@semel-store@test(=postgres::following::a_row_follows_an_operation_that_a_worker_runs)
take-locked@semel-store/src/sql/mod.rs@s/FOR NO KEY UPDATE SKIP LOCKED/FOR NO KEY UPDATE/@semel-testkit@test(=queues::a_worker_frozen_during_a_take_blocks_no_other)
worker-expired@semel/src/worker/expired.rs@s/ledger\.end_expired_leases\(\)\.await/Ok::<crate::store::Swept, crate::Error>(crate::store::Swept::default()).inspect(|_| drop(ledger.end_expired_leases()))/@semel-store@test(=sqlite::working::work_of_a_lost_node_goes_on_without_a_sweep)
worker-share@semel/src/worker/shares.rs@s/free\.div_ceil\(left\)/free/@semel@test(=worker::shares::tests::free_seats_are_shared_and_none_is_left_over)
worker-leave@semel/src/worker/rounds.rs@s/self\.leave\.send_replace\(true\);//@semel-store@test(=sqlite::working::a_stop_releases_runs_that_exceed_its_grace)
worker-probe@semel/src/worker/targets.rs@s/        pause\.probe = Some\(Uptime::now\(\) \+ PROBE\);\n//@semel@test(=worker::targets::tests::an_unreachable_target_pauses_and_one_run_probes_it)
priority-oldest@semel/src/store/take.rs@s/since\.saturating_add\(most\) \/ Self::OLDEST_OF/since.saturating_add(most.min(0)) \/ Self::OLDEST_OF/@semel@test(=worker::shares::tests::every_tenth_of_each_tenant_is_the_longest_due_of_all)
fleet-limit-turns@semel/src/worker/rounds.rs@s/                last\.insert\(asked\.kind, asked\.want\.scope\.clone\(\)\);\n//@semel-store@test(=sqlite::working::tenants_share_the_limit_of_a_fleet)
worker-unbegun@semel/src/worker/rounds.rs@s/let stopping = is_over\(&self\.stop\);/let stopping = false;/@semel-store@test(=sqlite::working::a_stop_during_a_take_hands_back_its_operations)
rate-raised@semel-store/src/take.rs@s/if free_at > now\.saturating_add\(every\)/if free_at > i64::MAX - every/@semel-store@test(=sqlite::enqueue::the_limits_of_a_kind_are_shared_by_the_fleet)
take-frozen@semel-store/src/take.rs@s/idle_in_transaction_session_timeout = '5s'/idle_in_transaction_session_timeout = '60s'/@semel-testkit@test(=queues::a_worker_frozen_during_a_large_take_blocks_others_for_seconds)
cancel-lapsed@semel/src/machine/tend.rs@s/if lapsed\(stored, now\) \{ lapse\(stored, fence, now\) \} else \{ \(stored\.clone/if lapsed(stored, now) { end_lease(stored, fence, now) } else { (stored.clone/@semel@test(=machine::tests::every_pair::every_event_on_every_kind_of_row_keeps_the_invariants)
newer-terms@semel/src/machine/mod.rs@s/    op\.priority = successor\.priority;\n    op\.terms = successor\.terms;\n//@semel-store@test(=sqlite::enqueue::newer_data_that_waits_for_a_run_keeps_the_terms_of_its_enqueue)
newer-terms-older@semel/src/operation.rs@s/if order != self\.order \{/if order > self.order {/@semel-store@test(=sqlite::enqueue::newer_data_that_waits_for_a_run_keeps_the_terms_of_its_enqueue)
cancel-newer@semel/src/machine/tend.rs@s/let detail = match op\.successor\.take\(\) \{/let detail = match op.successor.clone() {/@semel-store@test(=sqlite::enqueue::a_cancel_withdraws_newer_data_that_waits)
schedule-outage@semel/src/worker/timetable.rs@s/const GAP: Duration = Duration::from_secs\(30\)/const GAP: Duration = Duration::from_secs(30_000)/@semel-store@test(=sqlite::schedules::the_newer_of_two_schedules_survives_an_outage_and_a_pause)
schedule-missed@semel/src/worker/timetable.rs@s/mark\.next\.filter\(\|_\| known\.seen && schedule\.makes_up\(\)\)/mark.next.filter(|_| !known.seen \&\& schedule.makes_up())/@semel-store@test(=sqlite::schedules::a_changed_schedule_counts_from_now)
enqueue-given-up@semel/src/machine/enqueue.rs@s/State::TimedOut if op\.is_given_up\(\) =>/State::TimedOut if op.parked =>/@semel-store@test(=sqlite::enqueue::an_enqueue_is_exhausted_when_the_worker_has_given_up)
enqueue-probe@semel/src/claim.rs@s/self\.policy\.check_for_worker\(\)\?;/self.policy.check()?;/@semel-store@test(=sqlite::enqueue::an_enqueue_under_probe_is_refused)
webhook-paused@semel-server/src/services/webhooks/deliver.rs@s/\(if paused \{ None \}/(if paused \&\& event.id.is_empty() { None }/@semel-server@test(=webhooks_worker::sqlite::deliveries_of_a_paused_source_are_stored_and_run_after_the_pause)
schedule-locked-version@semel/src/worker/timetable.rs@s/known\.seen \|= moved \|\| .*?;/known.seen = moved || mark.is_some();/@semel-store@test(=postgres::schedules::a_changed_schedule_takes_over_a_mark_that_was_locked)
cancel-unheard@semel/src/machine/settle.rs@s/(\| Write::Withdraw\s+if lease\.cancelled) =>/$1 \&\& lease.terms.max_crashes == 0 =>/@semel-store@test(=sqlite::enqueue::a_cancelled_run_that_fails_or_is_released_does_not_run_again)
expires-before-retry@semel/src/machine/settle.rs@s/\(now \+ kept\)\.max\(retry \+ kept \/ 2\)/(now + kept).max(retry.min(now))/@semel-store@test(=sqlite::enqueue::a_failed_operation_does_not_expire_before_its_retry)
fleet-limit-tenants@semel-store/src/take.rs@s/running\.saturating_add\(already\)/running.saturating_add(already.min(0))/@semel-store@test(=sqlite::enqueue::the_limits_of_a_kind_are_shared_by_the_fleet)
worker-wrong-policy@semel/src/worker/rounds.rs@s/                self\.log_wrong_policy\(n, &scope, &error\);\n                continue;/                self.log_wrong_policy(n, \&scope, \&error);\n                return Err(error);/@semel-store@test(=sqlite::working::mistakes_in_one_kind_stop_no_other)
progress-forgives@semel/src/machine/settle.rs@s/if matches!\(write, Write::Progress\(_\)\) \{/if false {/@semel-store@test(=sqlite::enqueue::progress_forgives_crashes)
mailing-fence@semel-server/src/services/mailings/run.rs@s/mailing\.run != self\.number \|\| !mailing\.active/mailing.run < self.number/@semel-server@test(=mailings_stuck::sqlite::a_mailing_that_waits_for_its_time_is_cancelled_and_deleted_at_once) | test(=mailings_smtp::postgres::pauses_and_resumes_send_each_mail_once)
mailing-in-doubt@semel-server/src/services/mailings/send/verdicts.rs@s/if self\.never_misses && attempts/if attempts/@semel-server@test(=mailings_smtp::sqlite::a_lost_answer_is_in_doubt_until_a_person_decides)
mailing-window@semel-server/src/services/mailings/send/mod.rs@s/self\.course\.must_not_repeat\(&marked, now\)/self.course.must_not_repeat(\&marked, now).filter(String::is_empty)/@semel-server@test(=mailings_http::sqlite::a_mailing_resumed_after_the_window_repeats_nothing)
mailing-transport@semel-server/src/services/mailings/send/former.rs@s/mailing\.in_flight_by == transport\.recognised_by\(\)/mailing.in_flight_by != ""/@semel-server@test(=mailings_stuck::sqlite::another_transport_does_not_repeat_what_one_may_have_sent)
mailing-former@semel-server/src/services/mailings/run.rs@s/if mailing\.sending > 0 \{/if mailing.sending > 0 \&\& !mailing.is_stopped() {/@semel-server@test(=mailings_stuck::sqlite::mails_that_a_lost_node_was_sending_are_settled_although_the_mailing_is_cancelled)
mailing-waiting@semel-server/src/services/mailings/act.rs@s/before\.active && !before\.waiting && before/before.active \&\& before/@semel-server@test(=mailings_stuck::sqlite::a_mailing_that_waits_for_its_time_is_cancelled_and_deleted_at_once)
mailing-brake@semel-server/src/services/mailings/send/verdicts.rs@s/self\.refused >= IN_A_ROW/self.refused >= 100 * IN_A_ROW/@semel-server@test(=mailings_stuck::sqlite::a_server_that_refuses_everybody_does_not_burn_the_list)
mailing-held-smtp@semel-server/src/services/mailings/mail/smtp.rs@s/if held\.check\(\)\.is_err\(\) \{/if false {/@semel-server@test(=services::mailings::mail::tests::smtp::a_mail_whose_lease_is_lost_before_its_message_is_not_sent)
mailing-held-http@semel-server/src/services/mailings/mail/http.rs@s/Full::from\(body\), held\.clone\(\)/Full::from(body), Held::always()/@semel-server@test(=services::mailings::mail::tests::http::a_mail_whose_lease_is_lost_while_it_connects_is_not_sent)
mailing-stop@semel-server/src/services/mailings/send/mod.rs@s/match held\.stop\(\) \{/match false {/@semel-server@test(=mailings_stuck::a_graceful_stop_gives_back_the_mails_whose_message_has_not_begun)
mailing-outage@semel-server/src/services/mailings/send/verdicts.rs@s/ \|\| \(self\.is_cautious && self\.has_many\)//@semel-server@test(=mailings_trouble::sqlite::an_outage_of_the_provider_costs_the_list_no_attempts)
mailing-copy@semel-server/src/services/mailings/import.rs@s/Err\(_\) if refused\.load\(Ordering::Relaxed\) =>/Err(_) if refused.load(Ordering::Relaxed) \&\& batch.is_last =>/@semel-server@test(=mailings_traps::postgres::an_import_killed_between_batches_goes_on_without_loss_or_duplicates)
front-for-ever@semel-store/src/fronts.rs@s/if self\.trusted\.has_passed\(\) \{ LOW \} else \{ self\.places \}/self.places/@semel-store@test(=fronts::tests::a_look_from_the_fronts_does_not_prolong_their_trust) | test(=postgres::working::a_row_that_is_due_before_all_others_is_found)
front-low@semel-store/src/fronts.rs@s/\.map_or\(LOW, Front::places\)/.map_or(LOW, |_| LOW)/@semel-store@test(=fronts::tests::entries_of_ended_operations_are_not_read_again_while_a_snapshot_is_held)
worker-told@semel/src/worker/rounds.rs@s/                self\.is_told\(kind, \(scope\.kind\(\)\.to_owned\(\), scope\.tenant\(\)\.to_owned\(\)\)\);/                self.stale |= kind < self.kinds.len();/@semel-store@test(=sqlite::working::a_commit_wakes_the_worker_among_many_tenants)
worker-late-stop@semel/src/worker/mod.rs@s/    tokio::time::sleep\(grace\)\.await;/    tokio::time::sleep(grace + Duration::from_secs(60)).await;/@semel-store@test(=postgres::working::a_stop_does_not_wait_for_the_database)
take-apart-ends@semel-store/src/take.rs@s/                        if !taken\.is_empty\(\) \{/                        if taken.len() > 1000 {/@semel-store@test(=sqlite::working::a_take_returns_once_the_refused_row_is_set_aside)
put-off-note@semel/src/machine/settle.rs@s/note\.event != Event::Released\)/note.event != Event::Failed)/@semel-store@test(=sqlite::working::operations_of_a_paused_target_are_put_off_without_a_note)
put-off-apart@semel/src/worker/targets.rs@s/ \+ pause\) \+ APART;/ + pause);/@semel@test(=worker::targets::tests::operations_of_a_long_queue_become_due_one_after_the_other)
LIST
}

# The tests that a filter names, one a line: `test(=a) | test(=b)`.
named() { grep -oE 'test\(=[^)]*\)' <<<"$1" | sed -E 's/^test\(=(.*)\)$/\1/'; }

# Whether the code still has what each mutant changes, and each test that should notice. A filter names its tests in
# full: with a filter that matches no test, a mutant would pass as caught, or as survived, without any test having run.
check() {
    local lost=0 name file change package tests test words
    words=$(find crates -name '*.rs' -exec grep -ohE '[a-z0-9_]+' {} + | sort -u)
    while IFS='@' read -r name file change package tests; do
        if [[ ! $tests =~ ^test\(=[a-z0-9_:]+\)(\ \|\ test\(=[a-z0-9_:]+\))*$ ]]; then
            echo "mutants.sh: $name: its filter is not of the form test(=…) | test(=…): $tests" >&2
            lost=1
        fi
        for test in $(named "$tests"); do
            if ! grep -qx "${test##*::}" <<<"$words"; then
                echo "mutants.sh: $name: there is no test ${test##*::}" >&2
                lost=1
            fi
        done
        if perl -0pe "$change" "crates/$file" | cmp -s "crates/$file" -; then
            echo "mutants.sh: $name cannot be made: crates/$file has changed, and this script must follow" >&2
            lost=1
        fi
    done < <(mutants)
    return "$lost"
}
if [[ ${1:-} == --check ]]; then
    check
    exit
fi

# The working tree as it is, committed or not. Only what differs is copied, so that cargo builds only that.
copy_tree() {
    mkdir -p "$tree"
    # A file that a mutant changed in an earlier run has a newer time than its original, and is restored.
    (cd "$root" && git ls-files -co --exclude-standard -z) | while IFS= read -r -d '' file; do
        [[ -f $root/$file ]] || continue
        if ! cmp -s "$root/$file" "$tree/$file"; then
            mkdir -p "$(dirname "$tree/$file")"
            cp "$root/$file" "$tree/$file"
        fi
    done
    # Files that are gone.
    (cd "$tree" && find . -path ./target -prune -o -type f -printf '%P\0') | while IFS= read -r -d '' file; do
        [[ -f $root/$file ]] || rm "$tree/$file"
    done
}

# A mutant is built only where its tests are: in the package's integration tests, or in the library itself.
target_of() { if [[ $1 == *::tests::* ]]; then echo --lib; else echo --test=it; fi; }

run_tests() { # PACKAGE TARGET FILTER
    (cd "$tree" && cargo nextest run --package "$1" "$2" --filterset "$3" --no-fail-fast) 2>&1
}

# The names of the tests that passed.
passed() { sed -nE 's/^ +PASS \[[^]]*\] \([^)]*\) [^ ]+ (.*)$/\1/p' <<<"$1"; }

# The names of the tests that failed.
failed() { sed -nE 's/^ +(FAIL|TIMEOUT|SIG[A-Z]+) \[[^]]*\] \([^)]*\) [^ ]+ (.*)$/\2/p' <<<"$1" | sort -u | paste -sd ' '; }

wanted=("$@")
is_wanted() {
    [[ ${#wanted[@]} -eq 0 ]] && return 0
    local name
    for name in "${wanted[@]}"; do [[ $name == "$1" ]] && return 0; done
    return 1
}

mkdir -p "$root/target/mutants"
exec 7<"$root/target/mutants"
flock --nonblock 7 || { echo "mutants.sh: another run is at it" >&2; exit 1; }
copy_tree

# Without a mutation every one of these tests must pass; otherwise their failing proves nothing.
echo "== without a mutation"
mutants | while IFS='@' read -r name _ _ package tests; do
    if is_wanted "$name"; then echo "$package@$(target_of "$tests")@$tests"; fi
done | sort -u >"$root/target/mutants/tests"
cut -d@ -f1,2 "$root/target/mutants/tests" | uniq | while IFS='@' read -r package target; do
    filter=$(sed -n "s/^$package@$target@//p" "$root/target/mutants/tests" | paste -sd '|' | sed 's/|/ | /g')
    if ! said=$(run_tests "$package" "$target" "$filter" </dev/null); then
        echo "$said" | tail -n 60
        echo "mutants.sh: a test fails without a mutation" >&2
        exit 1
    fi
    echo "$said" | grep -E '^ +PASS'
    ran=$(passed "$said")
    while IFS= read -r test; do
        if ! grep -qxF "$test" <<<"$ran"; then
            echo "mutants.sh: $package has no test $test (looked for it by $target)" >&2
            exit 1
        fi
    done < <(named "$filter")
done

survived=0
table=
original=$root/target/mutants/original
while IFS='@' read -r name file change package tests; do
    is_wanted "$name" || continue
    echo "== $name"
    cp "$tree/crates/$file" "$original"
    perl -0pi -e "$change" "$tree/crates/$file"
    if cmp -s "$original" "$tree/crates/$file"; then
        verdict="CANNOT BE MADE: the code has changed, and this script must follow"
        survived=1
    else
        diff "$original" "$tree/crates/$file" | grep '^[<>]' || true
        if said=$(run_tests "$package" "$(target_of "$tests")" "$tests" </dev/null); then
            verdict=SURVIVED
            survived=1
        elif ! grep -q 'Nextest run ID' <<<"$said"; then
            echo "$said" | tail -n 40
            verdict="DOES NOT COMPILE"
            survived=1
        else
            noticed=$(failed "$said")
            verdict="caught by $noticed"
            if [[ -z $noticed ]]; then
                echo "$said" | tail -n 20
                verdict="SURVIVED: no test ran"
                survived=1
            fi
            # The output, in short.
            grep -A 3 'panicked at' <<<"$said" | grep -vE 'panicked at|RUST_BACKTRACE|^--|^ *$' | head -n 3 | cut -c 1-200 || true
        fi
    fi
    echo "   $verdict"
    table+=$(printf '%-22s %s' "$name" "$verdict")$'\n'
    cp "$original" "$tree/crates/$file"
done < <(mutants)

echo
echo "$table"
exit "$survived"
