#include "syncer/server/intake.h"

#include <assert.h>
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "common/mem.h"

#define SERVE_BYTES (1u << 20) /* Taken for one loan before the thread's others have their turn. */
#define WAKE_SLOT UINT64_MAX   /* In the set of a thread: the end. */

struct intake_thread {
    struct sy_intake *intake;
    pthread_t thread;
    bool runs;
    int epoll_fd;
    uint32_t assigned;    /* Loans that it receives for, away or not. */
    struct sy_loan *busy; /* Under the lock: the one that it reads for. */
    /* Under the lock: what is away. An event names a slot, since loans may go meanwhile. */
    struct sy_loan *slots[SY_LOANS_MAX];
};

struct sy_intake {
    pthread_mutex_t lock;
    pthread_cond_t idle; /* Some thread's `busy` has become another. */
    int back_fd, stop_fd;
    struct sy_loan *first, *last; /* Under the lock: back, in the order in which they came. */
    uint32_t at_home;             /* Loans that the network thread receives for. */
    uint32_t count;
    struct intake_thread threads[SY_INTAKE_THREADS_MAX];
};

/* --- under the lock -------------------------------------------------------------------------------------------------- */

static void come_back(struct sy_intake *intake, struct intake_thread *thread, struct sy_loan *loan)
{
    thread->slots[loan->slot] = NULL;
    epoll_ctl(thread->epoll_fd, EPOLL_CTL_DEL, loan->fd, NULL);
    loan->where = SY_LOAN_BACK;
    loan->prev = intake->last;
    loan->next = NULL;
    if (intake->last == NULL) {
        intake->first = loan;
        eventfd_write(intake->back_fd, 1);
    } else {
        intake->last->next = loan;
    }
    intake->last = loan;
}

static void unlink_back(struct sy_intake *intake, struct sy_loan *loan)
{
    *(loan->prev == NULL ? &intake->first : &loan->prev->next) = loan->next;
    *(loan->next == NULL ? &intake->last : &loan->next->prev) = loan->prev;
    loan->prev = loan->next = NULL;
    loan->where = SY_LOAN_HOME;
    if (intake->first == NULL) {
        eventfd_t count;
        eventfd_read(intake->back_fd, &count); /* It is readable as long as there are any. */
    }
}

static void recall(struct sy_intake *intake, struct sy_loan *loan)
{
    if (loan->where != SY_LOAN_AWAY) {
        return;
    }
    struct intake_thread *thread = &intake->threads[loan->hand - 2];
    atomic_store_explicit(&loan->recalled, true, memory_order_relaxed);
    while (thread->busy == loan) {
        pthread_cond_wait(&intake->idle, &intake->lock); /* For a piece: reads never block. */
    }
    if (loan->where == SY_LOAN_AWAY) {
        come_back(intake, thread, loan);
    }
}

/* --- threads ---------------------------------------------------------------------------------------------------------- */

/* A piece of the chunk's data; with the last of them, what comes behind. False: there is nothing more to do for now. */
static bool receive_piece(struct sy_loan *loan, uint64_t *total)
{
    uint8_t *at;
    size_t left = sy_placed_next(loan->parser, loan->receive, &at), got = 0;
    size_t first = DL_MIN(left, (size_t)SY_PIECE_BYTES), second = first == left ? SY_BESIDE_BYTES : 0;
    loan->rc = sy_placed_read(loan->fd, at, first, loan->beside, second, &got);
    if (loan->rc != DL_OK) {
        return false;
    }
    sy_placed_take(loan->parser, loan->receive, at, DL_MIN(got, first));
    loan->beside_bytes = got - DL_MIN(got, first);
    atomic_fetch_add_explicit(&loan->bytes, got, memory_order_relaxed);
    *total += got;
    return got == first + second && *total < SERVE_BYTES;
}

static bool is_done(const struct sy_loan *loan)
{
    uint8_t *at;
    return (loan->rc != DL_OK && loan->rc != DL_AGAIN) || sy_placed_next(loan->parser, loan->receive, &at) == 0;
}

static void serve(struct intake_thread *thread, uint64_t slot)
{
    struct sy_intake *intake = thread->intake;
    pthread_mutex_lock(&intake->lock);
    struct sy_loan *loan = thread->slots[slot];
    if (loan == NULL) { /* It was recalled when its event was on its way. */
        pthread_mutex_unlock(&intake->lock);
        return;
    }
    thread->busy = loan;
    pthread_mutex_unlock(&intake->lock);
    uint64_t total = 0;
    while (receive_piece(loan, &total) && !is_done(loan) &&
           !atomic_load_explicit(&loan->recalled, memory_order_relaxed)) {
    }
    pthread_mutex_lock(&intake->lock);
    thread->busy = NULL;
    if (is_done(loan)) {
        come_back(intake, thread, loan);
    }
    pthread_cond_signal(&intake->idle);
    pthread_mutex_unlock(&intake->lock);
}

static void *run(void *argument)
{
    struct intake_thread *thread = argument;
    struct epoll_event event;
    for (;;) {
        int count = epoll_wait(thread->epoll_fd, &event, 1, -1);
        if (count == 1 && event.data.u64 == WAKE_SLOT) {
            return NULL;
        }
        if (count == 1) {
            serve(thread, event.data.u64);
        }
    }
}

/* --- life --------------------------------------------------------------------------------------------------------------- */

static enum dl_rc start_thread(struct intake_thread *thread, struct dl_err *err)
{
    struct epoll_event stop = {.events = EPOLLIN, .data.u64 = WAKE_SLOT};
    thread->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    if (thread->epoll_fd < 0 || epoll_ctl(thread->epoll_fd, EPOLL_CTL_ADD, thread->intake->stop_fd, &stop) != 0) {
        return dl_err_errno(err, DL_EIO, errno, "making an epoll descriptor");
    }
    int failed = pthread_create(&thread->thread, NULL, run, thread);
    thread->runs = failed == 0;
    return failed == 0 ? DL_OK : dl_err_errno(err, DL_ENOMEM, failed, "starting a thread that receives");
}

enum dl_rc sy_intake_new(uint32_t threads, struct sy_intake **out, struct dl_err *err)
{
    assert(threads >= 1 && threads <= SY_INTAKE_THREADS_MAX);
    struct sy_intake *intake = calloc(1, sizeof *intake);
    if (intake == NULL) {
        return dl_err_set(err, DL_ENOMEM, "starting: no memory to receive with");
    }
    pthread_mutex_init(&intake->lock, NULL);
    pthread_cond_init(&intake->idle, NULL);
    intake->count = threads;
    for (uint32_t i = 0; i < threads; i++) {
        intake->threads[i].intake = intake;
        intake->threads[i].epoll_fd = -1;
    }
    intake->back_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    intake->stop_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    enum dl_rc rc = intake->back_fd >= 0 && intake->stop_fd >= 0
                        ? DL_OK
                        : dl_err_errno(err, DL_EIO, errno, "making an event descriptor");
    for (uint32_t i = 0; i < threads && rc == DL_OK; i++) {
        rc = start_thread(&intake->threads[i], err);
    }
    if (rc != DL_OK) {
        sy_intake_free(intake);
        return rc;
    }
    *out = intake;
    return DL_OK;
}

int sy_intake_fd(const struct sy_intake *intake)
{
    return intake->back_fd;
}

void sy_intake_stop(struct sy_intake *intake)
{
    if (intake->stop_fd >= 0) {
        eventfd_write(intake->stop_fd, 1);
    }
    for (uint32_t i = 0; i < intake->count; i++) {
        if (intake->threads[i].runs) {
            pthread_join(intake->threads[i].thread, NULL);
            intake->threads[i].runs = false;
        }
    }
    pthread_mutex_lock(&intake->lock);
    for (uint32_t i = 0; i < intake->count; i++) {
        for (uint32_t slot = 0; slot < SY_LOANS_MAX; slot++) {
            if (intake->threads[i].slots[slot] != NULL) {
                come_back(intake, &intake->threads[i], intake->threads[i].slots[slot]);
            }
        }
    }
    pthread_mutex_unlock(&intake->lock);
}

void sy_intake_free(struct sy_intake *intake)
{
    if (intake == NULL) {
        return;
    }
    sy_intake_stop(intake);
    assert(intake->first == NULL);
    for (uint32_t i = 0; i < intake->count; i++) {
        if (intake->threads[i].epoll_fd >= 0) {
            close(intake->threads[i].epoll_fd);
        }
    }
    if (intake->back_fd >= 0) {
        close(intake->back_fd);
    }
    if (intake->stop_fd >= 0) {
        close(intake->stop_fd);
    }
    pthread_cond_destroy(&intake->idle);
    pthread_mutex_destroy(&intake->lock);
    free(intake);
}

/* --- loans -------------------------------------------------------------------------------------------------------------- */

/* Who has fewest; the network thread before others. */
static void assign(struct sy_intake *intake, struct sy_loan *loan)
{
    uint32_t *least = &intake->at_home;
    loan->hand = 1;
    for (uint32_t i = 0; i < intake->count; i++) {
        if (intake->threads[i].assigned < *least) {
            least = &intake->threads[i].assigned;
            loan->hand = 2 + i;
        }
    }
    ++*least;
}

bool sy_intake_lend(struct sy_intake *intake, struct sy_loan *loan)
{
    uint8_t *at;
    assert(loan->where == SY_LOAN_HOME);
    if (sy_placed_next(loan->parser, loan->receive, &at) < SY_LOAN_BYTES_MIN || at == NULL) {
        return false;
    }
    if (loan->hand == 0) {
        assign(intake, loan);
    }
    if (loan->hand == 1) {
        return false;
    }
    struct intake_thread *thread = &intake->threads[loan->hand - 2];
    uint32_t slot = 0;
    pthread_mutex_lock(&intake->lock);
    while (slot < SY_LOANS_MAX && thread->slots[slot] != NULL) {
        slot++;
    }
    struct epoll_event event = {.events = EPOLLIN, .data.u64 = slot};
    bool lent = slot < SY_LOANS_MAX && epoll_ctl(thread->epoll_fd, EPOLL_CTL_ADD, loan->fd, &event) == 0;
    if (lent) {
        loan->rc = DL_OK;
        loan->beside_bytes = 0;
        loan->slot = slot;
        loan->where = SY_LOAN_AWAY;
        atomic_store_explicit(&loan->recalled, false, memory_order_relaxed);
        thread->slots[slot] = loan;
    }
    pthread_mutex_unlock(&intake->lock);
    return lent;
}

void sy_intake_recall(struct sy_intake *intake, struct sy_loan *loan)
{
    pthread_mutex_lock(&intake->lock);
    recall(intake, loan);
    pthread_mutex_unlock(&intake->lock);
}

struct sy_loan *sy_intake_take(struct sy_intake *intake)
{
    pthread_mutex_lock(&intake->lock);
    struct sy_loan *loan = intake->first;
    if (loan != NULL) {
        unlink_back(intake, loan);
    }
    pthread_mutex_unlock(&intake->lock);
    return loan;
}

void sy_intake_forget(struct sy_intake *intake, struct sy_loan *loan)
{
    pthread_mutex_lock(&intake->lock);
    recall(intake, loan);
    if (loan->where == SY_LOAN_BACK) {
        unlink_back(intake, loan);
    }
    pthread_mutex_unlock(&intake->lock);
    if (loan->hand != 0) {
        --*(loan->hand == 1 ? &intake->at_home : &intake->threads[loan->hand - 2].assigned);
        loan->hand = 0;
    }
}
