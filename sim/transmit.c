/* sim_world, what a syncer sends: control messages, and the newest version of each fragment that a connection lacks. */
#include <stdlib.h>
#include <string.h>

#include "common/codec.h"
#include "common/mem.h"
#include "sim/state.h"

void sim_transmit_soon(struct sim_world *world, uint32_t c)
{
    struct sim_conn *conn = world->conns[c];
    if (!conn->pumping && conn->syncer_open) {
        conn->pumping = true;
        sim_at(world, world->now_ns, SIM_SYNCER_PUMP, c, 0, conn->epoch, NULL);
    }
}

void sim_transmit(struct sim_world *world, uint32_t c, const struct dl_wire_message *message)
{
    struct sim_conn *conn = world->conns[c];
    struct sim_packet *packet = conn->syncer_open ? sim_packet_encode(world, message) : NULL;
    if (packet == NULL) {
        return;
    }
    if (conn->queue_count == conn->queue_capacity) {
        conn->queue_capacity = DL_MAX(2 * conn->queue_capacity, 16u);
        struct sim_packet **grown = realloc(conn->queue, conn->queue_capacity * sizeof(struct sim_packet *));
        if (grown == NULL) {
            free(packet);
            sim_fail(world, "no memory for a queue");
            return;
        }
        conn->queue = grown;
    }
    conn->queue[conn->queue_count++] = packet;
    sim_transmit_soon(world, c);
}

static void begin_update(struct sim_world *world, uint32_t c, uint32_t local)
{
    struct sim_conn *conn = world->conns[c];
    const struct sim_durable *version = &world->syncers[conn->shard].current[local];
    uint32_t fragment = conn->shard + local * world->config.spec->syncer.shards;
    enum dl_codec codec = world->config.spec->sync.broadcast_compression;
    conn->wanted[local] = false;
    conn->sending = conn->last_sent = local;
    conn->sending_version = version->version;
    conn->sending_content = version->content;
    conn->sending_offset = 0;
    conn->sending_bytes = dl_codec_bytes(codec, world->layout->fragments[fragment].padded_elements);
    struct dl_wire_message *message = &world->scratch;
    message->type = DL_WIRE_UPDATE;
    message->as.update = (struct dl_wire_update){.transfer = ++conn->transfers,
                                                 .fragment = fragment,
                                                 .version = version->version,
                                                 .round = version->round,
                                                 .codec = (uint8_t)codec,
                                                 .bytes = conn->sending_bytes,
                                                 .content_hash = version->content};
    sim_conn_down(world, c, sim_packet_encode(world, message));
}

static void send_chunk(struct sim_world *world, uint32_t c)
{
    struct sim_conn *conn = world->conns[c];
    struct sim_packet *packet = calloc(1, sizeof *packet);
    if (packet == NULL) {
        sim_fail(world, "no memory for a packet");
        return;
    }
    uint64_t most = dl_wire_chunk_data_bytes(world->config.spec->sync.broadcast_compression);
    packet->chunk = true;
    packet->transfer = conn->transfers;
    packet->offset = conn->sending_offset;
    packet->chunk_bytes = (uint32_t)DL_MIN(most, conn->sending_bytes - conn->sending_offset);
    packet->content = conn->sending_content;
    packet->intact = !sim_chance(world, world->faults.damage_share / 4);
    world->counts.damaged += packet->intact ? 0 : 1;
    conn->sending_offset += packet->chunk_bytes;
    if (conn->sending_offset == conn->sending_bytes) {
        conn->sending = SIM_NONE;
    }
    sim_conn_down(world, c, packet);
}

/* One message: control messages pass between chunks, STOP comes after everything else. */
void sim_syncer_pump(struct sim_world *world, uint32_t c)
{
    struct sim_conn *conn = world->conns[c];
    conn->pumping = false;
    if (!conn->syncer_open) {
        return;
    }
    int64_t next_ns = world->now_ns + 1;
    uint32_t wanted = SIM_NONE;
    uint32_t fragments = world->syncers[conn->shard].fragments;
    for (uint32_t k = 1; k <= fragments && wanted == SIM_NONE; k++) { /* In turn: on a slow link none is starved. */
        uint32_t i = (conn->last_sent + k) % fragments;
        wanted = conn->wanted[i] ? i : SIM_NONE;
    }
    if (conn->queue_count > 0) {
        sim_conn_down(world, c, conn->queue[0]);
        conn->queue_count--;
        memmove(conn->queue, conn->queue + 1, conn->queue_count * sizeof(struct sim_packet *));
    } else if (conn->sending != SIM_NONE) {
        send_chunk(world, c);
        next_ns = world->now_ns + sim_chunk_ns(world, conn);
    } else if (wanted != SIM_NONE) {
        begin_update(world, c, wanted);
    } else if (conn->has_farewell) {
        conn->has_farewell = false;
        world->scratch.type = DL_WIRE_STOP;
        world->scratch.as.stop = conn->farewell;
        sim_conn_down(world, c, sim_packet_encode(world, &world->scratch));
    } else {
        return;
    }
    conn->pumping = true;
    sim_at(world, next_ns, SIM_SYNCER_PUMP, c, 0, conn->epoch, NULL);
}
