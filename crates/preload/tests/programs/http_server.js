// Answers with what was sent, or with noise of a given size. It closes no idle connection by itself: on a busy machine a client can be late,
// and its request would meet the end of the connection. Usage: http_server.js ADDRESS PORT
const http = require('http');
const server = http.createServer((request, response) => {
  const size = /^\/noise\/(\d+)$/.exec(request.url);
  if (size) {
    const body = Buffer.alloc(Number(size[1]));
    for (let i = 0; i < body.length; i++) body[i] = (i * 2654435761) >>> 24;
    response.end(body);
  } else {
    response.writeHead(200, { 'X-Method': request.method });
    request.pipe(response);
  }
});
server.keepAliveTimeout = 0;
server.headersTimeout = 0;
server.requestTimeout = 0;
server.on('clientError', (error, socket) => {
  console.error(`an error of a connection: ${error}`);
  socket.destroy(error);
});
server.listen(Number(process.argv[3]), process.argv[2]);
