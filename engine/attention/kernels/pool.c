/* A small pool of waiting threads. Tasks are claimed one by one; the caller works too and never waits for a
 * thread that has claimed nothing, so a slow wake-up costs nothing. Idle threads sleep: no spinning.
 */
#include "qevict.h"

#include <stdlib.h>
#include <string.h>

#if defined(_WIN32)
#define THREADS 0
#else
#define THREADS 1
#include <pthread.h>
#include <sched.h>
#endif

#define MAX_THREADS 64

/* Where torch brings an OpenMP team, its threads do the work: they are awake already, and a second pool beside
 * them would fight for the same cores. The entry point is handed over by the caller; nothing links to OpenMP.
 */
static qe_team team = NULL;

void qe_set_team(qe_team entry) { team = entry; }

/* Scratch that belongs to the calling thread, only grows, and goes with the thread. */
static _Thread_local struct {
    void *raw;
    float *aligned;
    int64_t floats;
} held[2];

#if THREADS
static pthread_key_t leaving;
static pthread_once_t prepared = PTHREAD_ONCE_INIT;

static void release(void *unused) {
    (void)unused;
    for (int i = 0; i < 2; i++) free(held[i].raw), held[i].raw = NULL, held[i].floats = 0;
}

static void prepare(void) { pthread_key_create(&leaving, release); }
#endif

float *qe_scratch(int which, int64_t floats) {
    if (held[which].floats < floats) {
#if THREADS
        pthread_once(&prepared, prepare);
        pthread_setspecific(leaving, held);
#endif
        void *raw = malloc((size_t)floats * sizeof(float) + 64);
        if (!raw) return NULL;
        free(held[which].raw);
        held[which].raw = raw;
        held[which].aligned = (float *)(((uintptr_t)raw + 63) & ~(uintptr_t)63);
        held[which].floats = floats;
    }
    return held[which].aligned;
}

static void alone(qe_body body, void *context, int64_t tasks, float *scratch) {
    for (int64_t i = 0; i < tasks; i++) body(context, i, i + 1 < tasks ? i + 1 : -1, scratch);
}

#if THREADS

typedef struct {
    qe_body body;
    void *context;
    int64_t tasks, scratch_floats, next;
} job;

static pthread_mutex_t busy = PTHREAD_MUTEX_INITIALIZER; /* one caller uses the pool at a time */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t wake = PTHREAD_COND_INITIALIZER, done = PTHREAD_COND_INITIALIZER;
static job *current;
static int started, wanted, inside;
static uint64_t generation;
static int guarded;

static void work(void *argument) {
    job *j = argument;
    float *scratch = qe_scratch(0, j->scratch_floats);
    if (!scratch) return;
    int64_t task = __atomic_fetch_add(&j->next, 1, __ATOMIC_RELAXED);
    while (task < j->tasks) { /* the next task is claimed early, so that its data can be fetched ahead */
        int64_t next = __atomic_fetch_add(&j->next, 1, __ATOMIC_RELAXED);
        j->body(j->context, task, next < j->tasks ? next : -1, scratch);
        task = next;
    }
}

static void *worker(void *argument) {
    const int index = (int)(intptr_t)argument;
    uint64_t seen = 0;
    pthread_mutex_lock(&lock);
    for (;;) {
        while (generation == seen || index >= wanted) {
            seen = generation;
            pthread_cond_wait(&wake, &lock);
        }
        seen = generation;
        inside++;
        job *j = current;
        pthread_mutex_unlock(&lock);
        work(j);
        pthread_mutex_lock(&lock);
        if (--inside == 0) pthread_cond_signal(&done);
    }
    return NULL;
}

static void after_fork(void) { /* a child has no workers: it starts its own */
    started = wanted = inside = 0;
    pthread_mutex_init(&busy, NULL);
    pthread_mutex_init(&lock, NULL);
    pthread_cond_init(&wake, NULL);
    pthread_cond_init(&done, NULL);
}

static void start(int workers) {
    if (!guarded) {
        guarded = 1;
        pthread_atfork(NULL, NULL, after_fork);
    }
    while (started < workers) {
        pthread_t thread;
        pthread_attr_t detached;
        pthread_attr_init(&detached);
        pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
        int failed = pthread_create(&thread, &detached, worker, (void *)(intptr_t)started);
        pthread_attr_destroy(&detached);
        if (failed) return;
        started++;
    }
}

int qe_run(qe_body body, void *context, int64_t tasks, int64_t scratch_floats, int threads) {
    if (threads > MAX_THREADS) threads = MAX_THREADS;
    if (threads > tasks) threads = (int)tasks;
    job j = {body, context, tasks, scratch_floats, 0};
    float *scratch = qe_scratch(0, scratch_floats); /* with the caller's own, every task finds someone */
    if (!scratch) return 1;
    if (threads > 1 && team) {
        team(work, &j, (unsigned)threads, 0);
        return 0;
    }
    if (threads <= 1 || pthread_mutex_trylock(&busy)) {
        alone(body, context, tasks, scratch);
        return 0;
    }
    start(threads - 1);
    pthread_mutex_lock(&lock);
    current = &j;
    wanted = threads - 1;
    generation++;
    pthread_cond_broadcast(&wake);
    pthread_mutex_unlock(&lock);
    work(&j);
    /* A worker that wakes late finds no task left. Those inside finish at most the two tasks they hold. */
    for (int i = 0; i < 2000 && __atomic_load_n(&inside, __ATOMIC_ACQUIRE); i++)
        if (i % 64 == 63) sched_yield();
    pthread_mutex_lock(&lock);
    wanted = 0;
    while (inside) pthread_cond_wait(&done, &lock);
    pthread_mutex_unlock(&lock);
    pthread_mutex_unlock(&busy);
    return 0;
}

#else

int qe_run(qe_body body, void *context, int64_t tasks, int64_t scratch_floats, int threads) {
    (void)threads;
    float *scratch = qe_scratch(0, scratch_floats);
    if (!scratch) return 1;
    alone(body, context, tasks, scratch);
    return 0;
}

#endif
