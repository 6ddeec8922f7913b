// Generated from inc_runtime/protocol.py and inc_runtime/heap_layout.py by `python -m inc_runtime.device.generate`.
// Do not edit: change those files and run it again; a test fails when this file is out of date.
//
// The words of the protocol (roles, tags, headers, signal words) and its places (the regions of the symmetric heap of each
// role, with shapes and byte offsets). Plain C++17, for host and device. Sizes are int64_t, signal words uint64_t.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define INC_HOST_DEVICE __host__ __device__
#else
#define INC_HOST_DEVICE
#endif

namespace inc::protocol {

INC_HOST_DEVICE constexpr int64_t ceil_div(int64_t dividend, int64_t divisor) { return (dividend + divisor - 1) / divisor; }

INC_HOST_DEVICE constexpr int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

inline constexpr int64_t MAX_CHUNK_BYTES = 32768;
inline constexpr int64_t RELAY_CELLS = 512;
inline constexpr int64_t MIN_RELAY_CELLS = 8;
inline constexpr int64_t HEADER_FIELDS = 9;
inline constexpr int64_t CHUNK_FIELDS = 7;
inline constexpr int64_t ALIGNMENT = 256;
inline constexpr int64_t ERROR_BYTES = 4096;

enum class Role : int {
    COMPUTE_RANK = 0,
    DISPATCH_SWITCH = 1,
    COMBINE_SWITCH = 2,
};

enum class Tag : int {
    DISPATCH_TOKENS = 1,
    DISPATCH_REQUEST = 2,
    DISPATCH_GRANT = 3,
    DISPATCH_BARRIER = 4,
    EXPERT_ROWS = 5,
    COMBINE_PLAN = 6,
    COMBINE_PARTIAL_SUMS = 7,
    COMBINE_REQUEST = 8,
    TOKEN_SUMS = 9,
    RELAY_CHUNK = 10,
    RELAY_CREDIT = 11,
    RELAY_PHASE = 12,
    PE_BARRIER = 13,
};

INC_HOST_DEVICE constexpr const char* name_of(Tag member) {
    switch (member) {
        case Tag::DISPATCH_TOKENS: return "DISPATCH_TOKENS";
        case Tag::DISPATCH_REQUEST: return "DISPATCH_REQUEST";
        case Tag::DISPATCH_GRANT: return "DISPATCH_GRANT";
        case Tag::DISPATCH_BARRIER: return "DISPATCH_BARRIER";
        case Tag::EXPERT_ROWS: return "EXPERT_ROWS";
        case Tag::COMBINE_PLAN: return "COMBINE_PLAN";
        case Tag::COMBINE_PARTIAL_SUMS: return "COMBINE_PARTIAL_SUMS";
        case Tag::COMBINE_REQUEST: return "COMBINE_REQUEST";
        case Tag::TOKEN_SUMS: return "TOKEN_SUMS";
        case Tag::RELAY_CHUNK: return "RELAY_CHUNK";
        case Tag::RELAY_CREDIT: return "RELAY_CREDIT";
        case Tag::RELAY_PHASE: return "RELAY_PHASE";
        case Tag::PE_BARRIER: return "PE_BARRIER";
        default: return "?";
    }
}

// int64 fields in front of the rows of a put.
struct Header {
    enum Field : int { NUM_ROWS = 0, STEP = 1, BOUND_TOKENS = 2, MICROBATCH_TOKENS = 3, NUM_EXPERTS = 4, TOP_K = 5, HIDDEN_SIZE = 6, LAYER = 7, EDGE_TOKENS = 8 };
};

// int64 fields in front of a relayed chunk.
struct Chunk {
    enum Field : int { DESTINATION = 0, MAGIC = 1, NUMBER = 2, NUM_CHUNKS = 3, FIRST_ROW = 4, NUM_ROWS = 5, MESSAGE_ROWS = 6 };
};

INC_HOST_DEVICE constexpr uint64_t signal_word(uint64_t magic, bool has_payload) { return (magic << 1) | has_payload; }

INC_HOST_DEVICE constexpr uint64_t arrival_threshold(uint64_t magic) { return magic << 1; }

INC_HOST_DEVICE constexpr uint64_t magic_of(uint64_t word) { return word >> 1; }

INC_HOST_DEVICE constexpr bool has_payload(uint64_t word) { return (word & 1) != 0; }

INC_HOST_DEVICE constexpr uint64_t slot_of(uint64_t magic, uint64_t depth) { return magic % depth; }

enum class CommunicationModel : int {
    ALL_GATHER_REDUCE_SCATTER = 0,
    ALL_TO_ALL = 1,
    ALL_TO_ALL_PHASED = 2,
    INC_ALL_GATHER_REDUCE_SCATTER = 3,
    INC_ALL_GATHER_REDUCE_SCATTER_PHASED = 4,
    INC_ALL_TO_ALL = 5,
    INC_ALL_TO_ALL_PHASED = 6,
};

INC_HOST_DEVICE constexpr bool in_network(CommunicationModel model) { return ((0x78u >> static_cast<int>(model)) & 1u) != 0; }

INC_HOST_DEVICE constexpr bool phased(CommunicationModel model) { return ((0x54u >> static_cast<int>(model)) & 1u) != 0; }

INC_HOST_DEVICE constexpr bool selective(CommunicationModel model) { return ((0x66u >> static_cast<int>(model)) & 1u) != 0; }

// PEs in order: the compute ranks, then the dispatch switches, then the combine switches.
struct World {
    int64_t num_ranks;
    int64_t num_dispatch_switches;
    int64_t num_combine_switches;

    INC_HOST_DEVICE constexpr int64_t num_pes() const { return (num_ranks + num_dispatch_switches) + num_combine_switches; }
    INC_HOST_DEVICE constexpr Role role_of(int64_t pe) const {
        return (pe < num_ranks)
            ? Role::COMPUTE_RANK
            : (pe < (num_ranks + num_dispatch_switches))
            ? Role::DISPATCH_SWITCH
            : Role::COMBINE_SWITCH;
    }
    INC_HOST_DEVICE constexpr int64_t plane_of(int64_t pe) const {
        return (pe < num_ranks)
            ? 0
            : (pe < (num_ranks + num_dispatch_switches))
            ? pe - num_ranks
            : (pe - num_ranks) - num_dispatch_switches;
    }
    INC_HOST_DEVICE constexpr int64_t dispatch_switch(int64_t plane) const { return num_ranks + plane; }
    INC_HOST_DEVICE constexpr int64_t combine_switch(int64_t plane) const { return (num_ranks + num_dispatch_switches) + plane; }
};

// The sizes that every shape is made of. `ranks_per_phase` is num_ranks where the model is not phased.
struct Dims {
    CommunicationModel model;
    World world;
    int64_t depth;
    int64_t microbatch_tokens;
    int64_t hidden_size;
    int64_t top_k;
    int64_t ranks_per_phase;
    int64_t row_element_bytes = 2;
    bool local_bypass = false;
    int64_t row_group_tokens = 0;

    INC_HOST_DEVICE constexpr int64_t num_ranks() const { return world.num_ranks; }
    INC_HOST_DEVICE constexpr int64_t whole_message_slots() const { return (num_relays() == 0) ? depth : 0; }
    INC_HOST_DEVICE constexpr int64_t dispatch_planes() const { return larger(world.num_dispatch_switches, 1); }
    INC_HOST_DEVICE constexpr int64_t combine_planes() const { return larger(world.num_combine_switches, 1); }
    INC_HOST_DEVICE constexpr int64_t dispatch_plane_tokens() const { return ceil_div(microbatch_tokens, dispatch_planes()); }
    INC_HOST_DEVICE constexpr int64_t combine_plane_tokens() const { return ceil_div(microbatch_tokens, combine_planes()); }
    INC_HOST_DEVICE constexpr int64_t row_groups() const {
        return (row_group_tokens == 0)
            ? 0
            : ceil_div(dispatch_plane_tokens(), row_group_tokens);
    }
    INC_HOST_DEVICE constexpr int64_t expert_row_capacity() const {
        return (dispatch_planes() * num_ranks()) * dispatch_plane_tokens();
    }
    INC_HOST_DEVICE constexpr int64_t rows_per_chunk() const {
        return (num_relays() == 0)
            ? microbatch_tokens
            : ((32768 / (hidden_size * row_element_bytes)) > 1)
            ? ((32768 / (hidden_size * row_element_bytes)) > microbatch_tokens)
            ? microbatch_tokens
            : 32768 / (hidden_size * row_element_bytes)
            : (microbatch_tokens < 1)
            ? microbatch_tokens
            : 1;
    }
    INC_HOST_DEVICE constexpr int64_t relay_cells() const {
        return (combine_chunks() > dispatch_chunks())
            ? ((512 / num_ranks()) > 8)
            ? ((512 / num_ranks()) > (((2 * depth) * num_ranks()) * combine_chunks()))
            ? ((2 * depth) * num_ranks()) * combine_chunks()
            : 512 / num_ranks()
            : ((((2 * depth) * num_ranks()) * combine_chunks()) < 8)
            ? ((2 * depth) * num_ranks()) * combine_chunks()
            : 8
            : ((512 / num_ranks()) > 8)
            ? ((512 / num_ranks()) > (((2 * depth) * num_ranks()) * dispatch_chunks()))
            ? ((2 * depth) * num_ranks()) * dispatch_chunks()
            : 512 / num_ranks()
            : ((((2 * depth) * num_ranks()) * dispatch_chunks()) < 8)
            ? ((2 * depth) * num_ranks()) * dispatch_chunks()
            : 8;
    }
    INC_HOST_DEVICE constexpr int64_t num_relays() const { return world.num_dispatch_switches + world.num_combine_switches; }
    INC_HOST_DEVICE constexpr int64_t dispatch_chunks() const {
        return larger(ceil_div(dispatch_plane_tokens(), rows_per_chunk()), 1);
    }
    INC_HOST_DEVICE constexpr int64_t combine_chunks() const {
        return larger(ceil_div(combine_plane_tokens(), rows_per_chunk()), 1);
    }
    INC_HOST_DEVICE constexpr int64_t senders_per_flag() const { return phased(model) ? num_ranks() : 1; }
    INC_HOST_DEVICE constexpr int64_t inbox_slots() const { return phased(model) ? ranks_per_phase : depth * num_ranks(); }
};

// The routing record of one row. Fields: int32 token, int32 sender, int32 expert_ids[top_k], float32 weights[top_k].
struct RoutingRecord {
    INC_HOST_DEVICE static constexpr int64_t token_offset(int64_t /*top_k*/) { return 0; }
    INC_HOST_DEVICE static constexpr int64_t sender_offset(int64_t /*top_k*/) { return 4; }
    INC_HOST_DEVICE static constexpr int64_t expert_ids_offset(int64_t /*top_k*/) { return 8; }
    INC_HOST_DEVICE static constexpr int64_t weights_offset(int64_t top_k) { return 8 + 4 * top_k; }
    INC_HOST_DEVICE static constexpr int64_t num_bytes(int64_t top_k) { return 8 + 8 * top_k; }
};

enum class Kind : int {
    ROWS = 0,
    RECORDS = 1,
    FLAGS = 2,
    CONTROL = 3,
};

enum class Element : int {
    FLOAT32 = 0,
    UINT64 = 1,
    INT64 = 2,
    INT32 = 3,
    UINT8 = 4,
    ROW = 5,
    ROUTING_RECORD = 6,
};

INC_HOST_DEVICE constexpr int64_t element_bytes(Element member, const Dims& d) {
    switch (member) {
        case Element::FLOAT32: return 4;
        case Element::UINT64: return 8;
        case Element::INT64: return 8;
        case Element::INT32: return 4;
        case Element::UINT8: return 1;
        case Element::ROW: return d.row_element_bytes;
        case Element::ROUTING_RECORD: return RoutingRecord::num_bytes(d.top_k);
        default: return 0;
    }
}

inline constexpr int MAX_DIMENSIONS = 5;

// A region of the role that the enum belongs to. `models` has a bit for each communication model that has the region.
// A private region is memory of its PE outside of the heap: it has a shape and no offset.
struct Description {
    const char* name;
    Kind kind;
    Element element;
    uint32_t models;
    bool is_private;
};

struct Shape {
    int num_dimensions;
    int64_t size[MAX_DIMENSIONS];

    INC_HOST_DEVICE constexpr int64_t num_elements() const {
        int64_t product = 1;
        for (int i = 0; i < num_dimensions; ++i) product *= size[i];
        return product;
    }
};

// Regions of a rank, in the order of the heap: who writes; who reads.
enum class RankRegion : int {
    abort = 0,  // any PE; every wait
    pe_barrier = 1,  // every PE, its own word; this PE
    magic = 2,  // this PE; this PE
    error_record = 3,  // this PE; PEs that see its abort
    tokens = 4,  // this rank; its own put
    tokens_header = 5,  // this rank; its own put
    tokens_routing = 6,  // this rank; its own put
    packed_tokens = 7,  // pack; its own puts
    expert_rows = 8,  // dispatch switch; then this rank, whose partial sums overwrite them; this rank, combine switch
    expert_rows_routing = 9,  // dispatch switch; this rank
    expert_rows_header = 10,  // dispatch switch; this rank
    expert_group_arrived = 11,  // dispatch switch; this rank
    expert_rows_arrived = 12,  // dispatch switch; this rank
    token_sums = 13,  // combine switch; this rank
    token_sums_arrived = 14,  // combine switch; this rank
    dispatch_grants = 15,  // dispatch switch; this rank
    barrier_released = 16,  // dispatch switch 0; this rank
    expert_chunk_arrived = 17,  // relay; this rank
    received_partial_sums = 18,  // relay; global reduce
    partial_chunk_arrived = 19,  // relay; this rank
    relay_credits = 20,  // relay; this rank
    message_header = 21,  // this rank; its own put
    chunks_sent = 22,  // this rank; this rank
    chunk_header = 23,  // this rank; its own put
    phase_opened = 24,  // relay; this rank
    ports = 25,  // whoever moves rows through a port of this rank; the same
    NUM_REGIONS = 26,
};

INC_HOST_DEVICE constexpr Description describe(RankRegion member) {
    switch (member) {
        case RankRegion::abort: return {"abort", Kind::FLAGS, Element::UINT64, 0x7fu, false};
        case RankRegion::pe_barrier: return {"pe_barrier", Kind::FLAGS, Element::UINT64, 0x7fu, false};
        case RankRegion::magic: return {"magic", Kind::CONTROL, Element::UINT64, 0x7fu, false};
        case RankRegion::error_record: return {"error_record", Kind::CONTROL, Element::UINT8, 0x7fu, false};
        case RankRegion::tokens: return {"tokens", Kind::ROWS, Element::ROW, 0x78u, false};
        case RankRegion::tokens_header: return {"tokens_header", Kind::CONTROL, Element::INT64, 0x7fu, false};
        case RankRegion::tokens_routing: return {"tokens_routing", Kind::RECORDS, Element::ROUTING_RECORD, 0x7fu, false};
        case RankRegion::packed_tokens: return {"packed_tokens", Kind::ROWS, Element::ROW, 0x07u, false};
        case RankRegion::expert_rows: return {"expert_rows", Kind::ROWS, Element::ROW, 0x7fu, false};
        case RankRegion::expert_rows_routing: return {"expert_rows_routing", Kind::RECORDS, Element::ROUTING_RECORD, 0x7fu, false};
        case RankRegion::expert_rows_header: return {"expert_rows_header", Kind::CONTROL, Element::INT64, 0x7fu, false};
        case RankRegion::expert_group_arrived: return {"expert_group_arrived", Kind::FLAGS, Element::UINT64, 0x28u, false};
        case RankRegion::expert_rows_arrived: return {"expert_rows_arrived", Kind::FLAGS, Element::UINT64, 0x78u, false};
        case RankRegion::token_sums: return {"token_sums", Kind::ROWS, Element::ROW, 0x78u, false};
        case RankRegion::token_sums_arrived: return {"token_sums_arrived", Kind::FLAGS, Element::UINT64, 0x78u, false};
        case RankRegion::dispatch_grants: return {"dispatch_grants", Kind::FLAGS, Element::UINT64, 0x54u, false};
        case RankRegion::barrier_released: return {"barrier_released", Kind::FLAGS, Element::UINT64, 0x54u, false};
        case RankRegion::expert_chunk_arrived: return {"expert_chunk_arrived", Kind::FLAGS, Element::UINT64, 0x07u, false};
        case RankRegion::received_partial_sums: return {"received_partial_sums", Kind::ROWS, Element::ROW, 0x07u, false};
        case RankRegion::partial_chunk_arrived: return {"partial_chunk_arrived", Kind::FLAGS, Element::UINT64, 0x07u, false};
        case RankRegion::relay_credits: return {"relay_credits", Kind::FLAGS, Element::UINT64, 0x07u, false};
        case RankRegion::message_header: return {"message_header", Kind::CONTROL, Element::INT64, 0x07u, false};
        case RankRegion::chunks_sent: return {"chunks_sent", Kind::CONTROL, Element::UINT64, 0x07u, false};
        case RankRegion::chunk_header: return {"chunk_header", Kind::CONTROL, Element::INT64, 0x07u, false};
        case RankRegion::phase_opened: return {"phase_opened", Kind::FLAGS, Element::UINT64, 0x04u, false};
        case RankRegion::ports: return {"ports", Kind::CONTROL, Element::UINT64, 0x7fu, false};
        default: return {"?", Kind::CONTROL, Element::UINT8, 0u, true};
    }
}

INC_HOST_DEVICE constexpr Shape shape(RankRegion member, const Dims& d) {
    switch (member) {
        case RankRegion::abort: return {1, {1}};
        case RankRegion::pe_barrier: return {1, {d.world.num_pes()}};
        case RankRegion::magic: return {1, {1}};
        case RankRegion::error_record: return {1, {4096}};
        case RankRegion::tokens: return {3, {d.depth, d.microbatch_tokens, d.hidden_size}};
        case RankRegion::tokens_header: return {3, {d.depth, d.dispatch_planes(), 9}};
        case RankRegion::tokens_routing: return {2, {d.depth, d.microbatch_tokens}};
        case RankRegion::packed_tokens: return {4, {d.depth, d.num_ranks(), d.microbatch_tokens, d.hidden_size}};
        case RankRegion::expert_rows: return {3, {d.depth, d.expert_row_capacity(), d.hidden_size}};
        case RankRegion::expert_rows_routing: return {2, {d.depth, d.expert_row_capacity()}};
        case RankRegion::expert_rows_header: return {4, {d.depth, d.dispatch_planes(), d.num_ranks(), 9}};
        case RankRegion::expert_group_arrived: return {4, {d.depth, d.dispatch_planes(), d.num_ranks(), d.row_groups()}};
        case RankRegion::expert_rows_arrived: return {3, {d.depth, d.dispatch_planes(), d.senders_per_flag()}};
        case RankRegion::token_sums: return {3, {d.depth, d.microbatch_tokens, d.hidden_size}};
        case RankRegion::token_sums_arrived: return {2, {d.depth, d.combine_planes()}};
        case RankRegion::dispatch_grants: return {2, {d.dispatch_planes(), d.ranks_per_phase}};
        case RankRegion::barrier_released: return {1, {1}};
        case RankRegion::expert_chunk_arrived: return {4, {d.depth, d.dispatch_planes(), d.num_ranks(), d.dispatch_chunks()}};
        case RankRegion::received_partial_sums: return {5, {d.depth, d.combine_planes(), d.num_ranks(), d.combine_plane_tokens(), d.hidden_size}};
        case RankRegion::partial_chunk_arrived: return {4, {d.depth, d.combine_planes(), d.num_ranks(), d.combine_chunks()}};
        case RankRegion::relay_credits: return {2, {d.num_relays(), d.relay_cells()}};
        case RankRegion::message_header: return {3, {d.whole_message_slots(), d.num_ranks(), 9}};
        case RankRegion::chunks_sent: return {1, {d.num_relays()}};
        case RankRegion::chunk_header: return {3, {d.num_relays(), d.relay_cells(), 7}};
        case RankRegion::phase_opened: return {3, {d.depth, d.combine_planes(), d.num_ranks()}};
        case RankRegion::ports: return {1, {2}};
        default: return {0, {}};
    }
}

// Regions of a dispatch switch, in the order of the heap: who writes; who reads.
enum class DispatchSwitchRegion : int {
    abort = 0,  // any PE; every wait
    pe_barrier = 1,  // every PE, its own word; this PE
    magic = 2,  // this PE; this PE
    error_record = 3,  // this PE; PEs that see its abort
    relay_chunk = 4,  // rank; this relay
    relay_header = 5,  // rank; this relay
    relay_routing = 6,  // rank; this relay
    relay_rows = 7,  // rank; this relay
    relay_arrived = 8,  // rank; this relay
    stop = 9,  // rank; this switch
    inbox_tokens = 10,  // rank; this switch
    inbox_header = 11,  // rank; this switch
    inbox_routing = 12,  // rank; this switch
    group_arrived = 13,  // rank; this switch
    tokens_arrived = 14,  // rank; this switch
    outbox_header = 15,  // this switch; its own puts
    dispatch_requests = 16,  // rank; this switch
    barrier_joined = 17,  // rank; dispatch switch 0
    NUM_REGIONS = 18,
};

INC_HOST_DEVICE constexpr Description describe(DispatchSwitchRegion member) {
    switch (member) {
        case DispatchSwitchRegion::abort: return {"abort", Kind::FLAGS, Element::UINT64, 0x7fu, false};
        case DispatchSwitchRegion::pe_barrier: return {"pe_barrier", Kind::FLAGS, Element::UINT64, 0x7fu, false};
        case DispatchSwitchRegion::magic: return {"magic", Kind::CONTROL, Element::UINT64, 0x7fu, false};
        case DispatchSwitchRegion::error_record: return {"error_record", Kind::CONTROL, Element::UINT8, 0x7fu, false};
        case DispatchSwitchRegion::relay_chunk: return {"relay_chunk", Kind::CONTROL, Element::INT64, 0x07u, false};
        case DispatchSwitchRegion::relay_header: return {"relay_header", Kind::CONTROL, Element::INT64, 0x07u, false};
        case DispatchSwitchRegion::relay_routing: return {"relay_routing", Kind::RECORDS, Element::ROUTING_RECORD, 0x07u, false};
        case DispatchSwitchRegion::relay_rows: return {"relay_rows", Kind::ROWS, Element::ROW, 0x07u, false};
        case DispatchSwitchRegion::relay_arrived: return {"relay_arrived", Kind::FLAGS, Element::UINT64, 0x07u, false};
        case DispatchSwitchRegion::stop: return {"stop", Kind::FLAGS, Element::UINT64, 0x7fu, false};
        case DispatchSwitchRegion::inbox_tokens: return {"inbox_tokens", Kind::ROWS, Element::ROW, 0x78u, false};
        case DispatchSwitchRegion::inbox_header: return {"inbox_header", Kind::CONTROL, Element::INT64, 0x78u, false};
        case DispatchSwitchRegion::inbox_routing: return {"inbox_routing", Kind::RECORDS, Element::ROUTING_RECORD, 0x78u, false};
        case DispatchSwitchRegion::group_arrived: return {"group_arrived", Kind::FLAGS, Element::UINT64, 0x28u, false};
        case DispatchSwitchRegion::tokens_arrived: return {"tokens_arrived", Kind::FLAGS, Element::UINT64, 0x78u, false};
        case DispatchSwitchRegion::outbox_header: return {"outbox_header", Kind::CONTROL, Element::INT64, 0x78u, false};
        case DispatchSwitchRegion::dispatch_requests: return {"dispatch_requests", Kind::FLAGS, Element::UINT64, 0x54u, false};
        case DispatchSwitchRegion::barrier_joined: return {"barrier_joined", Kind::FLAGS, Element::UINT64, 0x54u, false};
        default: return {"?", Kind::CONTROL, Element::UINT8, 0u, true};
    }
}

INC_HOST_DEVICE constexpr Shape shape(DispatchSwitchRegion member, const Dims& d) {
    switch (member) {
        case DispatchSwitchRegion::abort: return {1, {1}};
        case DispatchSwitchRegion::pe_barrier: return {1, {d.world.num_pes()}};
        case DispatchSwitchRegion::magic: return {1, {1}};
        case DispatchSwitchRegion::error_record: return {1, {4096}};
        case DispatchSwitchRegion::relay_chunk: return {3, {d.num_ranks(), d.relay_cells(), 7}};
        case DispatchSwitchRegion::relay_header: return {3, {d.num_ranks(), d.relay_cells(), 9}};
        case DispatchSwitchRegion::relay_routing: return {3, {d.num_ranks(), d.relay_cells(), d.rows_per_chunk()}};
        case DispatchSwitchRegion::relay_rows: return {4, {d.num_ranks(), d.relay_cells(), d.rows_per_chunk(), d.hidden_size}};
        case DispatchSwitchRegion::relay_arrived: return {2, {d.num_ranks(), d.relay_cells()}};
        case DispatchSwitchRegion::stop: return {1, {d.num_ranks()}};
        case DispatchSwitchRegion::inbox_tokens: return {3, {d.inbox_slots(), d.dispatch_plane_tokens(), d.hidden_size}};
        case DispatchSwitchRegion::inbox_header: return {2, {d.inbox_slots(), 9}};
        case DispatchSwitchRegion::inbox_routing: return {2, {d.inbox_slots(), d.dispatch_plane_tokens()}};
        case DispatchSwitchRegion::group_arrived: return {3, {d.depth, d.num_ranks(), d.row_groups()}};
        case DispatchSwitchRegion::tokens_arrived: return {2, {d.depth, d.num_ranks()}};
        case DispatchSwitchRegion::outbox_header: return {4, {d.depth, d.num_ranks(), d.num_ranks(), 9}};
        case DispatchSwitchRegion::dispatch_requests: return {1, {d.num_ranks()}};
        case DispatchSwitchRegion::barrier_joined: return {1, {d.num_ranks()}};
        default: return {0, {}};
    }
}

// Regions of a combine switch, in the order of the heap: who writes; who reads.
enum class CombineSwitchRegion : int {
    abort = 0,  // any PE; every wait
    pe_barrier = 1,  // every PE, its own word; this PE
    magic = 2,  // this PE; this PE
    error_record = 3,  // this PE; PEs that see its abort
    relay_chunk = 4,  // rank; this relay
    relay_header = 5,  // rank; this relay
    relay_routing = 6,  // rank; this relay
    relay_rows = 7,  // rank; this relay
    relay_arrived = 8,  // rank; this relay
    stop = 9,  // rank; this switch
    plan_header = 10,  // dispatch switch; rank when phased; this switch
    plan_routing = 11,  // dispatch switch; rank when phased; this switch
    plan_arrived = 12,  // dispatch switch; this switch
    partial_sums_ready = 13,  // rank; this switch
    combine_requests = 14,  // rank; this switch
    sums_out = 15,  // this switch; its own puts
    landing = 16,  // its own get; this switch
    accumulators = 17,  // this switch; this switch
    NUM_REGIONS = 18,
};

INC_HOST_DEVICE constexpr Description describe(CombineSwitchRegion member) {
    switch (member) {
        case CombineSwitchRegion::abort: return {"abort", Kind::FLAGS, Element::UINT64, 0x7fu, false};
        case CombineSwitchRegion::pe_barrier: return {"pe_barrier", Kind::FLAGS, Element::UINT64, 0x7fu, false};
        case CombineSwitchRegion::magic: return {"magic", Kind::CONTROL, Element::UINT64, 0x7fu, false};
        case CombineSwitchRegion::error_record: return {"error_record", Kind::CONTROL, Element::UINT8, 0x7fu, false};
        case CombineSwitchRegion::relay_chunk: return {"relay_chunk", Kind::CONTROL, Element::INT64, 0x07u, false};
        case CombineSwitchRegion::relay_header: return {"relay_header", Kind::CONTROL, Element::INT64, 0x07u, false};
        case CombineSwitchRegion::relay_routing: return {"relay_routing", Kind::RECORDS, Element::ROUTING_RECORD, 0x07u, false};
        case CombineSwitchRegion::relay_rows: return {"relay_rows", Kind::ROWS, Element::ROW, 0x07u, false};
        case CombineSwitchRegion::relay_arrived: return {"relay_arrived", Kind::FLAGS, Element::UINT64, 0x07u, false};
        case CombineSwitchRegion::stop: return {"stop", Kind::FLAGS, Element::UINT64, 0x7fu, false};
        case CombineSwitchRegion::plan_header: return {"plan_header", Kind::CONTROL, Element::INT64, 0x78u, false};
        case CombineSwitchRegion::plan_routing: return {"plan_routing", Kind::RECORDS, Element::ROUTING_RECORD, 0x78u, false};
        case CombineSwitchRegion::plan_arrived: return {"plan_arrived", Kind::FLAGS, Element::UINT64, 0x28u, false};
        case CombineSwitchRegion::partial_sums_ready: return {"partial_sums_ready", Kind::FLAGS, Element::UINT64, 0x28u, false};
        case CombineSwitchRegion::combine_requests: return {"combine_requests", Kind::FLAGS, Element::UINT64, 0x54u, false};
        case CombineSwitchRegion::sums_out: return {"sums_out", Kind::ROWS, Element::ROW, 0x78u, false};
        case CombineSwitchRegion::landing: return {"landing", Kind::ROWS, Element::ROW, 0x78u, true};
        case CombineSwitchRegion::accumulators: return {"accumulators", Kind::ROWS, Element::FLOAT32, 0x78u, true};
        default: return {"?", Kind::CONTROL, Element::UINT8, 0u, true};
    }
}

INC_HOST_DEVICE constexpr Shape shape(CombineSwitchRegion member, const Dims& d) {
    switch (member) {
        case CombineSwitchRegion::abort: return {1, {1}};
        case CombineSwitchRegion::pe_barrier: return {1, {d.world.num_pes()}};
        case CombineSwitchRegion::magic: return {1, {1}};
        case CombineSwitchRegion::error_record: return {1, {4096}};
        case CombineSwitchRegion::relay_chunk: return {3, {d.num_ranks(), d.relay_cells(), 7}};
        case CombineSwitchRegion::relay_header: return {3, {d.num_ranks(), d.relay_cells(), 9}};
        case CombineSwitchRegion::relay_routing: return {3, {d.num_ranks(), d.relay_cells(), d.rows_per_chunk()}};
        case CombineSwitchRegion::relay_rows: return {4, {d.num_ranks(), d.relay_cells(), d.rows_per_chunk(), d.hidden_size}};
        case CombineSwitchRegion::relay_arrived: return {2, {d.num_ranks(), d.relay_cells()}};
        case CombineSwitchRegion::stop: return {1, {d.num_ranks()}};
        case CombineSwitchRegion::plan_header: return {4, {d.depth, d.dispatch_planes(), d.num_ranks(), 9}};
        case CombineSwitchRegion::plan_routing: return {4, {d.depth, d.dispatch_planes(), d.num_ranks(), d.dispatch_plane_tokens()}};
        case CombineSwitchRegion::plan_arrived: return {2, {d.depth, d.dispatch_planes()}};
        case CombineSwitchRegion::partial_sums_ready: return {2, {d.depth, d.num_ranks()}};
        case CombineSwitchRegion::combine_requests: return {2, {d.depth, d.num_ranks()}};
        case CombineSwitchRegion::sums_out: return {3, {d.ranks_per_phase, d.combine_plane_tokens(), d.hidden_size}};
        case CombineSwitchRegion::landing: return {2, {d.ranks_per_phase * d.combine_plane_tokens(), d.hidden_size}};
        case CombineSwitchRegion::accumulators: return {3, {d.ranks_per_phase, d.combine_plane_tokens(), d.hidden_size}};
        default: return {0, {}};
    }
}

template <class Region>
INC_HOST_DEVICE constexpr bool exists(Region region, const Dims& d) {
    return (describe(region).models >> static_cast<int>(d.model)) & 1u;
}

// Bytes of a region; 0 where the communication model has no such region.
template <class Region>
INC_HOST_DEVICE constexpr int64_t num_bytes(Region region, const Dims& d) {
    if (!exists(region, d)) return 0;
    return shape(region, d).num_elements() * element_bytes(describe(region).element, d);
}

// Byte offset of every region in the heap of its role; -1 for one that is private or that the model does not have.
// `end` is where the role's regions end. Compute it once on the host and pass it to kernels by value.
template <class Region>
struct Offsets {
    int64_t of[static_cast<int>(Region::NUM_REGIONS)];
    int64_t end;

    INC_HOST_DEVICE constexpr int64_t operator[](Region region) const { return of[static_cast<int>(region)]; }
};

template <class Region>
INC_HOST_DEVICE constexpr Offsets<Region> offsets(const Dims& d) {
    Offsets<Region> result{};
    for (int i = 0; i < static_cast<int>(Region::NUM_REGIONS); ++i) {
        const Region region = static_cast<Region>(i);
        const bool placed = exists(region, d) && !describe(region).is_private;
        result.of[i] = placed ? result.end : -1;
        if (placed) result.end += ceil_div(num_bytes(region, d), ALIGNMENT) * ALIGNMENT;
    }
    return result;
}

template <class Region>
INC_HOST_DEVICE constexpr int64_t offset(Region region, const Dims& d) {
    return offsets<Region>(d)[region];
}

// Bytes of the symmetric heap on every PE: the maximum over the roles.
INC_HOST_DEVICE constexpr int64_t heap_bytes(const Dims& d) {
    return larger(larger(offsets<RankRegion>(d).end, offsets<DispatchSwitchRegion>(d).end), offsets<CombineSwitchRegion>(d).end);
}

}  // namespace inc::protocol
