// For a Python module that was built with CORE_STOPS: the process sends itself a signal at one of its stops.
#include <signal.h>

#include "../lane.h"

static _Atomic int armed = -1, left;
static int number;

// Lets the process send itself signal `with` when it reaches `place` for the `hits`th time from now on.
__attribute__((visibility("default"))) void core_stop_at(int place, int hits, int with) {
    number = with;
    atomic_store(&left, hits);
    atomic_store(&armed, place);
}

void core_stop(enum stop place) {
    if ((int)place == atomic_load(&armed) && atomic_fetch_sub(&left, 1) == 1) raise(number);
}
