//! Every order of claims, work, settles, crashes, lost answers, pauses and sweeps, up to a budget
//! of faults, with the laws that must hold at every moment of all of them.

mod world;

use semel::{OnLost, State};
use stateright::{Checker, Model, Property};
use world::{Action, Effect, Flaw, Mind, Moment, World};

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

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Law::always(FENCED, |_, moment| moment.broken.is_empty()),
            Law::always(COMPLETED_ONCE, |_, moment| no_payload_twice(&moment.completions)),
            Law::always(NEVER_OLDER, |_, moment| never_older(&moment.completions)),
            Law::always(ATOMIC, |world, moment| !world.atomic || moment.effects == moment.completions),
            Law::always(NEVER_TWICE, |_, moment| no_payload_twice(&moment.effects)),
            Law::always(NOBODY_WAITS_FOR_EVER, |world, moment| {
                settled_for_good(world, moment) || !World::actions(world, moment).is_empty()
            }),
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

type Law = Property<World>;

const FENCED: &str = "an old fence changes nothing, and an outcome stays as it was given";
const COMPLETED_ONCE: &str = "a payload completes at most once";
const NEVER_OLDER: &str = "what is older never completes after what is newer";
const ATOMIC: &str = "in atomic mode the effects are exactly the accepted completions";
const NEVER_TWICE: &str = "a payload never takes effect twice";
const NOBODY_WAITS_FOR_EVER: &str = "when nothing can happen any more, it is settled for good";
const SETTLES: &str = "however it goes, it is settled for good in the end";
const COMPLETES: &str = "it can complete";
const ZOMBIE: &str = "somebody can believe to hold a lease that is another's";

fn no_payload_twice(effects: &[Effect]) -> bool {
    let mut seen: Vec<_> = effects.iter().map(|effect| (effect.id, effect.payload)).collect();
    seen.sort_unstable();
    seen.windows(2).all(|pair| pair[0] != pair[1])
}

fn never_older(effects: &[Effect]) -> bool {
    effects.windows(2).all(|pair| pair[0].id != pair[1].id || pair[0].payload < pair[1].payload)
}

/// The newest payload has taken effect, or it is known not to have: in doubt, or exhausted.
fn settled_for_good(world: &World, moment: &Moment) -> bool {
    let newest = world.workers.iter().max().copied();
    match &moment.row {
        None => moment.purged,
        Some(op) => match op.state {
            State::Completed => op.order == newest,
            State::InDoubt => !world.prober,
            State::Failed | State::TimedOut => op.parked || op.failures >= 2 || op.crashes >= 3,
            State::Pending | State::Processing => false,
        },
    }
}

/// Workers are alike: which of them does what makes no difference.
fn any_worker(moment: &Moment) -> Moment {
    let mut moment = moment.clone();
    moment.workers.sort_unstable();
    moment
}

fn check(name: &str, world: World) {
    let checker = world.checker().symmetry_fn(any_worker).spawn_dfs().join();
    println!("{name}: {} moments, {} of them different", checker.state_count(), checker.unique_state_count());
    checker.assert_properties();
}

/// What the checker finds in a world that is not as it should be.
fn finds(world: World) -> Vec<&'static str> {
    let checker = world.checker().spawn_bfs().join();
    let mut found: Vec<_> = checker.discoveries().into_iter().collect();
    found.retain(|(name, _)| ![COMPLETES, ZOMBIE].contains(name));
    for (name, path) in &found {
        println!("{name}: {:?}", path.clone().into_actions());
    }
    found.into_iter().map(|(name, _)| name).collect()
}

fn world(on_lost: OnLost) -> World {
    let workers = vec![1, 1];
    World { atomic: false, on_lost, workers, prober: false, purger: false, faults: 2, pauses: 3, flaw: None }
}

fn atomic_world() -> World {
    World { atomic: true, ..world(OnLost::Rerun) }
}

#[test]
fn in_atomic_mode_every_history_takes_effect_once() {
    check("atomic", atomic_world());
}

#[test]
fn under_hold_no_history_takes_effect_twice() {
    check("hold", world(OnLost::Hold));
}

#[test]
fn with_a_prober_every_history_takes_effect_once_outside_of_the_database() {
    check("probe", World { prober: true, ..world(OnLost::Probe) });
}

#[test]
fn newer_data_runs_once_after_the_older_in_every_history() {
    check("newer data", World { workers: vec![1, 2], ..atomic_world() });
}

#[test]
fn a_purged_key_has_a_new_life_that_no_zombie_can_touch() {
    check("purge", World { purger: true, ..atomic_world() });
}

#[test]
fn a_store_without_fences_is_found_out() {
    let flaw = Some(Flaw::AnyFenceWillDo);
    let found = finds(World { flaw, ..atomic_world() });
    assert!(found.contains(&FENCED), "{found:?}");
}
