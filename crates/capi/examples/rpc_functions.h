/* What rpc_server.c offers and rpc_client.c calls. */
#include <partywall_rpc.h>

PW_RPC(double, power, double, base, double, exponent)

struct node {
    long value;
    const struct node *next;
};
