/* sim_world, connections: packets arrive in order, after a delay; a blocked connection holds them; a cut one loses
 * them. */
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"
#include "sim/state.h"

uint32_t sim_conn_new(struct sim_world *world, uint32_t learner, uint32_t shard)
{
    if (world->conn_count == world->conn_capacity) {
        uint32_t capacity = DL_MAX(2 * world->conn_capacity, 64u);
        struct sim_conn **grown = realloc(world->conns, capacity * sizeof(struct sim_conn *));
        if (grown == NULL) {
            sim_fail(world, "no memory for connections");
            return SIM_NONE;
        }
        world->conns = grown;
        world->conn_capacity = capacity;
    }
    struct sim_conn *conn = calloc(1, sizeof *conn);
    if (conn == NULL) {
        sim_fail(world, "no memory for a connection");
        return SIM_NONE;
    }
    conn->learner = learner;
    conn->shard = shard;
    conn->incarnation = world->learners[learner].generation;
    conn->member = SY_NO_MEMBER;
    conn->sending = SIM_NONE;
    world->conns[world->conn_count] = conn;
    return world->conn_count++;
}

struct sim_packet *sim_packet_encode(struct sim_world *world, const struct dl_wire_message *message)
{
    size_t used = 0;
    struct dl_err err;
    if (dl_wire_encode(message, world->encode_buffer, SIM_ENCODE_BYTES, &used, &err) != DL_OK) {
        sim_fail(world, "%s", err.text);
        return NULL;
    }
    struct sim_packet *packet = calloc(1, sizeof *packet + used);
    if (packet == NULL) {
        sim_fail(world, "no memory for a packet");
        return NULL;
    }
    packet->size = used;
    memcpy(packet->bytes, world->encode_buffer, used);
    return packet;
}

const struct dl_wire_message *sim_packet_decode(struct sim_world *world, const struct sim_packet *packet)
{
    struct dl_wire_header header;
    struct dl_err err;
    enum dl_rc rc = dl_wire_header_decode(packet->bytes, &header, &err);
    if (rc == DL_OK) {
        rc = dl_wire_decode(header.type, packet->bytes + DL_WIRE_HEADER_BYTES, packet->size - DL_WIRE_HEADER_BYTES,
                            &world->scratch, &err);
    }
    if (rc != DL_OK) {
        sim_fail(world, "%s", err.text);
        return NULL;
    }
    return &world->scratch;
}

static int64_t arrival(struct sim_world *world, const struct sim_conn *conn, const struct sim_packet *packet,
                       int64_t *clear_ns)
{
    int64_t delay_ns = sim_ns(world->faults.delay_seconds * (1 + (double)dl_rng_uniform(&world->rng)));
    delay_ns += packet != NULL && packet->chunk ? sim_ns(world->learners[conn->learner].chunk_seconds) : 0;
    int64_t at_ns = DL_MAX(world->now_ns + delay_ns, conn->blocked_until_ns);
    *clear_ns = DL_MAX(*clear_ns, at_ns);
    return *clear_ns;
}

int64_t sim_chunk_ns(const struct sim_world *world, const struct sim_conn *conn)
{
    return sim_ns(world->faults.chunk_seconds + world->learners[conn->learner].chunk_seconds);
}

void sim_conn_up(struct sim_world *world, uint32_t c, struct sim_packet *packet)
{
    struct sim_conn *conn = world->conns[c];
    if (packet != NULL) {
        packet->number = ++conn->up_sent;
        sim_at(world, arrival(world, conn, packet, &conn->up_clear_ns), SIM_UP, c, 0, 0, packet);
    }
}

void sim_conn_down(struct sim_world *world, uint32_t c, struct sim_packet *packet)
{
    struct sim_conn *conn = world->conns[c];
    if (packet != NULL) {
        packet->number = ++conn->down_sent;
        sim_at(world, arrival(world, conn, packet, &conn->down_clear_ns), SIM_DOWN, c, 0, 0, packet);
    }
}

void sim_conn_arrived(struct sim_world *world, uint32_t c, bool up, const struct sim_packet *packet)
{
    struct sim_conn *conn = world->conns[c];
    uint64_t *arrived = up ? &conn->up_arrived : &conn->down_arrived;
    if (packet->number != ++*arrived) {
        sim_fail(world, "connection %u: packet %llu came when %llu was due", c, (unsigned long long)packet->number,
                 (unsigned long long)*arrived);
    }
}

void sim_conn_close(struct sim_world *world, uint32_t c, bool by_learner)
{
    struct sim_conn *conn = world->conns[c];
    bool *mine = by_learner ? &conn->link_open : &conn->syncer_open;
    if (!*mine) {
        return;
    }
    *mine = false;
    int64_t *clear_ns = by_learner ? &conn->up_clear_ns : &conn->down_clear_ns;
    sim_at(world, arrival(world, conn, NULL, clear_ns), by_learner ? SIM_SYNCER_LOST : SIM_LINK_LOST, c, 0, 0, NULL);
}

/* What is sent from now on never arrives. One end or both notice; an end that does not has its timeout. */
void sim_conn_cut(struct sim_world *world, uint32_t c)
{
    struct sim_conn *conn = world->conns[c];
    if (!conn->link_open && !conn->syncer_open) {
        return;
    }
    world->counts.cuts++;
    bool half = sim_chance(world, world->faults.half_open_share);
    world->counts.half_open += half ? 1 : 0;
    bool blind_learner = half && dl_rng_below(&world->rng, 2) == 0;
    double notice = world->faults.notice_seconds;
    conn->blocked_until_ns = INT64_MAX / 2; /* Nothing passes any more. */
    conn->up_clear_ns = conn->down_clear_ns = INT64_MAX / 2;
    if (!blind_learner) {
        sim_at(world, world->now_ns + sim_ns(sim_uniform(&world->rng, 0, notice)), SIM_LINK_LOST, c, 0, 0, NULL);
    }
    if (!half || blind_learner) {
        sim_at(world, world->now_ns + sim_ns(sim_uniform(&world->rng, 0, notice)), SIM_SYNCER_LOST, c, 0, 0, NULL);
    }
}
