//! Every order of claims, work, settles, crashes, lost answers, pauses and sweeps, up to a budget
//! of faults, with the laws that must hold at every moment of all of them.

mod deeds;
mod world;

use semel::{OnLost, State};
use stateright::{Checker, HasDiscoveries, Model, Property};
use world::{Action, Effect, Flaw, Mind, Moment, World};

type Law = Property<World>;

const FENCED: &str = "an old fence changes nothing, and an outcome stays as it was given";
const COMPLETED_ONCE: &str = "a payload completes at most once";
const NEVER_OLDER: &str = "older data never completes after newer data";
const ONE_AFTER_THE_OTHER: &str = "newer data takes effect only after the older is settled or resolved";
const ATOMIC: &str = "in atomic mode the effects are exactly the accepted completions";
const NEVER_TWICE: &str = "a payload never takes effect twice";
const ENDS_SETTLED: &str = "when no event is left, it is settled";
const SETTLES: &str = "every history ends settled";
const COMPLETES: &str = "it can complete";
const ZOMBIE: &str = "a worker can believe to hold a lease that another has";

impl Model for World {
    type State = Moment;
    type Action = Action;

    fn init_states(&self) -> Vec<Moment> {
        vec![self.begin()]
    }

    fn actions(&self, moment: &Moment, actions: &mut Vec<Action>) {
        actions.extend(World::actions(self, moment));
    }

    fn next_state(&self, moment: &Moment, action: Action) -> Option<Moment> {
        self.after(moment, action)
    }

    fn properties(&self) -> Vec<Law> {
        vec![
            Law::always(FENCED, |_, moment| moment.broken.is_none()),
            Law::always(COMPLETED_ONCE, |_, moment| no_payload_twice(&moment.completions)),
            Law::always(NEVER_OLDER, |_, moment| never_older(&moment.completions)),
            Law::always(ONE_AFTER_THE_OTHER, |_, moment| one_after_the_other(moment)),
            Law::always(ATOMIC, |world, moment| !world.atomic || moment.effects == moment.completions),
            Law::always(NEVER_TWICE, |_, moment| no_payload_twice(&moment.effects)),
            // Every action uses up part of a budget, so every history ends; this checks all the ends. The checker's own
            // `eventually` may miss some where histories join.
            Law::always(ENDS_SETTLED, |world, moment| settled_for_good(world, moment) || !world.is_over(moment)),
            Law::eventually(SETTLES, settled_for_good),
            Law::sometimes(COMPLETES, |_, moment| !moment.completions.is_empty()),
            Law::sometimes(ZOMBIE, |_, moment| {
                let fence = moment.row.as_ref().map(|op| op.fence);
                let late = |mind: Mind| matches!(mind, Mind::Holds { effect, .. } if Some(effect.fence) < fence);
                moment.workers.iter().any(|worker| late(worker.mind))
            }),
        ]
    }
}

fn no_payload_twice(effects: &[Effect]) -> bool {
    let mut seen: Vec<_> = effects.iter().map(|effect| (effect.life, effect.payload)).collect();
    seen.sort_unstable();
    seen.windows(2).all(|pair| pair[0] != pair[1])
}

fn never_older(effects: &[Effect]) -> bool {
    effects.windows(2).all(|pair| pair[0].life != pair[1].life || pair[0].payload < pair[1].payload)
}

fn one_after_the_other(moment: &Moment) -> bool {
    let known = |older: &Effect| {
        let mut completed = moment.completions.iter().map(|effect| (effect.life, effect.payload));
        completed.any(|it| it == (older.life, older.payload))
    };
    never_older(&moment.effects)
        && moment.effects.windows(2).all(|pair| pair[0].life != pair[1].life || known(&pair[0]))
}

/// The newest payload has taken effect, or is known not to have; or it is in doubt and will never be resolved.
fn settled_for_good(world: &World, moment: &Moment) -> bool {
    let Some(op) = &moment.row else { return moment.life > 0 };
    let newest = op.order == world.workers.iter().max().copied();
    match op.state {
        State::Completed => newest,
        State::InDoubt => !world.prober,
        State::Failed | State::TimedOut => newest && (op.parked || op.failures >= 2 || op.crashes >= 3),
        State::Pending | State::Processing => false,
    }
}

/// Workers are interchangeable: their order makes no difference.
fn any_worker(moment: &Moment) -> Moment {
    let mut moment = moment.clone();
    moment.workers.sort_unstable();
    moment
}

/// Explores all states of a world. `make torture` allows more faults.
fn check(world: World) {
    let more = u8::from(std::env::var_os("SEMEL_TORTURE").is_some());
    let world = World { faults: world.faults + more, pauses: world.pauses + more, ..world };
    println!("{world:?}");
    let checker = world.checker().symmetry_fn(any_worker).spawn_dfs().join();
    println!("{} moments, {} of them different", checker.state_count(), checker.unique_state_count());
    checker.assert_properties();
}

/// The shortest histories in which a flawed world breaks laws.
fn broken_laws(world: World) -> Vec<&'static str> {
    let checker = world.checker().finish_when(HasDiscoveries::AnyFailures).spawn_bfs().join();
    let mut found: Vec<_> = checker.discoveries().into_iter().collect();
    found.retain(|(name, _)| ![COMPLETES, ZOMBIE].contains(name));
    for (name, path) in &found {
        println!("{name}: {:?}", path.clone().into_actions());
    }
    found.into_iter().map(|(name, _)| name).collect()
}

fn leased(on_lost: OnLost) -> World {
    World {
        atomic: false,
        on_lost,
        workers: vec![1, 1],
        prober: false,
        purger: false,
        echoes: false,
        faults: 3,
        pauses: 3,
        flaw: None,
    }
}

fn atomic() -> World {
    World { atomic: true, ..leased(OnLost::Rerun) }
}

#[test]
fn in_atomic_mode_every_history_takes_effect_once() {
    check(World { workers: vec![1, 1, 1], ..atomic() });
}

#[test]
fn under_hold_no_history_takes_effect_twice() {
    check(World { workers: vec![1, 1, 1], ..leased(OnLost::Hold) });
}

#[test]
fn with_a_prober_every_history_outside_of_the_database_takes_effect_once() {
    check(World { prober: true, ..leased(OnLost::Probe) });
}

#[test]
fn a_claim_that_arrives_twice_does_no_harm() {
    check(World { echoes: true, faults: 2, ..atomic() });
    check(World { echoes: true, faults: 2, ..leased(OnLost::Hold) });
}

#[test]
fn newer_data_runs_once_and_after_the_older_in_every_history() {
    check(World { workers: vec![1, 2], faults: 2, pauses: 2, ..atomic() });
}

#[test]
fn newer_data_outside_of_the_database_is_never_made_twice_either() {
    check(World { workers: vec![1, 2], faults: 2, pauses: 2, ..leased(OnLost::Hold) });
    check(World { workers: vec![1, 2], faults: 1, pauses: 2, prober: true, ..leased(OnLost::Probe) });
}

#[test]
fn a_purged_key_has_a_new_life_that_no_zombie_can_touch() {
    check(World { purger: true, faults: 2, ..atomic() });
}

#[test]
fn the_checker_finds_out_a_store_without_fences() {
    let broken = broken_laws(World { flaw: Some(Flaw::AnyFenceWillDo), ..atomic() });
    assert!(broken.contains(&FENCED), "{broken:?}");
}

#[test]
fn the_checker_finds_out_fences_that_begin_again_with_the_row() {
    let broken = broken_laws(World { purger: true, flaw: Some(Flaw::FencesOfTheRow), ..atomic() });
    assert!(broken.contains(&ATOMIC) || broken.contains(&NEVER_TWICE), "{broken:?}");
}

#[test]
fn the_checker_finds_a_release_that_frees_a_key_after_its_effect() {
    let broken = broken_laws(World { workers: vec![1, 2], flaw: Some(Flaw::ReleaseForgets), ..atomic() });
    assert!(broken.contains(&NEVER_TWICE), "{broken:?}");
}

#[test]
fn the_checker_finds_out_a_commit_that_is_made_again_instead_of_read_back() {
    let broken = broken_laws(World { flaw: Some(Flaw::NoReadBack), ..atomic() });
    assert!(broken.contains(&NEVER_TWICE), "{broken:?}");
}

#[test]
fn the_checker_finds_out_that_a_rerun_outside_of_the_database_may_take_effect_twice() {
    let broken = broken_laws(leased(OnLost::Rerun));
    assert!(broken.contains(&NEVER_TWICE), "{broken:?}");
}

#[test]
fn the_checker_finds_out_a_worker_that_begins_after_its_lease() {
    let broken = broken_laws(World { prober: true, flaw: Some(Flaw::LateWork), ..leased(OnLost::Probe) });
    assert!(broken.contains(&NEVER_TWICE), "{broken:?}");
}

#[test]
fn the_checker_finds_out_a_clock_that_forgets_the_longest_run() {
    let broken = broken_laws(World { prober: true, flaw: Some(Flaw::EndlessRenewals), ..leased(OnLost::Probe) });
    assert!(broken.contains(&NEVER_TWICE), "{broken:?}");
}
